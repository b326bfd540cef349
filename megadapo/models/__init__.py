"""Model families and the one reader of a Hugging Face config.json."""
