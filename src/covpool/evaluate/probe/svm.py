"""Linear SVMs on the vectors of a trained head."""
