"""The end of a step that has too few mixed groups, or too many responses without a score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from megadapo.data.group import Group
from megadapo.errors import InfraError, SamplingError
from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.sampling.statistics import StepCounters


def check_failures(
    counters: StepCounters, config: SamplingConfig, max_share: float, group: Group
) -> None:
    """Check the share of a step's responses that reward functions or environments failed on.

    It compares with a whole batch at least, and not at the end of the step: a function that always
    fails must not use up the prompts.

    Args:
        max_share: largest share, reward.max_failed_share.
        group: the latest group; the share cannot have grown if none of its responses failed.

    Raises:
        InfraError: the share is larger.
    """
    if not group.failures:
        return
    # a restart is no fault, and must not be the cause of the next one
    num_failed = counters.num_excluded - counters.num_interrupted
    num_scored = sum(group.num_responses for group in counters.stats)
    planned = config.prompts_per_step * config.responses_per_prompt
    share = num_failed / max(planned, num_failed + num_scored)
    if share > max_share:
        last = group.failures[-1]
        raise InfraError(
            f"reward functions or environments failed on {num_failed} responses of the step, "
            f"{share:.1%} of them, and reward.max_failed_share = {max_share:g}; the last failure "
            f"is of {last.source}: {last.reason}. Nothing of the step is trained on. Mend it or "
            "its server, or raise reward.max_failed_share"
        )


def check_size(num_found: int, counters: StepCounters, config: SamplingConfig) -> None:
    """Check the number of mixed groups of a batch.

    Raises:
        SamplingError: it is 0, or too small and sampling.on_shortfall is "stop".
    """
    needed = config.prompts_per_step
    if num_found == needed or (num_found and config.on_shortfall == "train"):
        return
    histogram = Counter(group.num_correct for group in counters.stats)
    num_responses = config.responses_per_prompt
    raise SamplingError(describe_shortfall(num_found, needed, histogram, num_responses))


def describe_shortfall(
    num_found: int, num_needed: int, histogram: Mapping[int, int], num_responses: int
) -> str:
    """Return the message for a batch with too few mixed groups, with a histogram and advice.

    `histogram`: number of groups by their number of correct responses.
    """
    num_asked = sum(histogram.values())
    num_wrong = histogram.get(0, 0)
    num_correct = histogram.get(num_responses, 0)
    bars = "\n".join(
        f"  {correct:>3} of {num_responses} correct: {count} groups"
        for correct, count in sorted(histogram.items())
    )
    advice = (
        "the problems are too hard for the model, or the scorer cannot read the answers: check both"
        if num_wrong >= num_correct
        else "the problems are too easy for the model: use harder ones"
    )
    return (
        f"the batch has only {num_found} of {num_needed} groups after {num_asked} requests: "
        f"{num_wrong} groups were all incorrect, {num_correct} all correct\n{bars}\n{advice}, or "
        "raise sampling.responses_per_prompt or sampling.max_asked_per_prompt"
    )
