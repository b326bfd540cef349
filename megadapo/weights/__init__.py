"""Layouts of each model family's weights, and their import, export and updates.

`layout/` turns a family's table into shards; everything else works on those shards. Imports neither
megatron nor, outside of the vLLM plugin, vllm.
"""
