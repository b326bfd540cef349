"""Transports of a weight update: shared memory, CUDA IPC, NCCL or Gloo."""
