"""Worker processes that score responses: limits, isolation, sandbox."""
