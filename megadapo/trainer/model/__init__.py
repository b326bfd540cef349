"""The megatron-core model of one rank: layers, head, experts, process groups, CPU platform."""
