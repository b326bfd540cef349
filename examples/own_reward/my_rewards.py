"""A reward function: correct answers score 1, and shorter ones a little more."""


def short_and_right(response: str, tokens: list[int], ground_truth: str) -> dict[str, float | bool]:
    """Return score, correctness and one more number, which becomes a metric."""
    right = response.strip().endswith(f"Answer: {ground_truth}")
    brevity = 1.0 / (1.0 + len(tokens))
    return {"score": right + 0.1 * brevity, "correct": right, "brevity": brevity}
