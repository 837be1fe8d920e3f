"""The command line: a verb a file, each a thin door to a function of the library."""
