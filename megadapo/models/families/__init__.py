"""One table of weights per model family."""
