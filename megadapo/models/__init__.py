"""What each model family consists of, and the one reader of a Hugging Face configuration."""
