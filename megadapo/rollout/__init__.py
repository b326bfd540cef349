"""Rollouts: vLLM engines in Ray actors, dynamic sampling, evaluation."""
