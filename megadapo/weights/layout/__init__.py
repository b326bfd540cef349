"""Position of each weight in Megatron, in vLLM and in Hugging Face files."""
