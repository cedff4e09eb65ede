"""The largest batch that a memory budget holds."""
