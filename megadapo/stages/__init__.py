"""The stages around reinforcement learning, which train on rows of data instead of rollouts."""
