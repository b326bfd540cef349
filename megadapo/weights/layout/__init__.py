"""Where each weight lies in Megatron, vLLM and Hugging Face, and how it is cut."""
