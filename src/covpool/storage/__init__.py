"""The only package that opens, reads, writes, locks and hashes files, on disk and in object storage."""
