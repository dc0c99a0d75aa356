"""Commands that write a working folder, or a new study."""
