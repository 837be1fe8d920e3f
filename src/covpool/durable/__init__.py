"""What is written so that a kill, a crash or a full disk cannot leave half of it."""
