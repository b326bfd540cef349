"""Model folders: read, write, convert and compare."""
