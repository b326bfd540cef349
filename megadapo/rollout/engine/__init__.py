"""One rollout engine: the Ray actor around vLLM. Only this folder imports vLLM."""
