"""Model folders: read, written, converted and compared."""
