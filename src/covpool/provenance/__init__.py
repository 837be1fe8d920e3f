"""Where a result comes from: the code, the versions beneath it, and the machine."""
