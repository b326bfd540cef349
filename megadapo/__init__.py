"""megadapo: DAPO training of reasoning models at Megatron scale."""

__version__ = "0.1.0"
