"""How each model family's weights are laid out, and everything derived from that one description.

`layout.py` turns a family's table into shards; import, export, gathering, the plan of a weight
update and its verification all work on those shards. Imports neither megatron nor, outside
`vllm_plugin.py`, vllm.
"""
