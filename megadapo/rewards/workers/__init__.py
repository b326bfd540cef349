"""Worker processes that can be killed, and the programs that run in them."""
