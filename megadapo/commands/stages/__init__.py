"""Commands of the stages around reinforcement learning."""
