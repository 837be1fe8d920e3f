"""Write the tables, pictures and lists of the pages: ``python -m lab figures NAME``."""
