"""The command line: each verb parses options, calls a function of the library, and prints its result."""
