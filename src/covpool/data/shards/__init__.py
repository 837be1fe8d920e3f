"""WebDataset tar shards with an index: written, read and ordered."""
