"""Images: where they are listed, read, checked, ordered and made into batches."""
