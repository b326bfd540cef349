"""Write rollouts of random tokens, train on them without engines, kill the run, and resume it.

    python tools/first_gpu/replay.py megadapo train RECIPE --KEY=VALUE ... --replay=FOLDER

FOLDER gets the rollouts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from parts import config_of
from runner import kill_and_resume

from megadapo.config import RunConfig
from megadapo.data.group import Response, Score
from megadapo.data.prompts import Prompt
from megadapo.observe.rollouts.files import step_file, write_rollouts
from megadapo.observe.rollouts.saved_group import SavedGroup, SavedResponse

MOST_TOKENS, NUM_IDS = 128, 16


def random_group(config: RunConfig, step: int, number: int) -> SavedGroup:
    """Return a group of a step with random responses."""
    rng = np.random.default_rng((step, number))
    longest = min(MOST_TOKENS, config.rollout.max_response_tokens)
    responses = []
    for size in rng.integers(1, longest + 1, config.sampling.responses_per_prompt):
        is_correct = bool(rng.integers(2))
        response = Response(
            token_ids=rng.integers(0, NUM_IDS, size).astype(np.int32),
            logprobs=np.full(size, -1.0, dtype=np.float32),
            finish_reason="stop",
            text="",
            policy_versions=np.full(size, step - 1, dtype=np.int32),
        )
        saved = SavedResponse(
            response=response,
            score=Score(reward=2.0 * is_correct - 1.0, correct=is_correct, answer="2"),
            tokens=("",) * int(size),
            logprobs_old=None,
            logprobs_update=None,
            penalty=0.0,
            shaped_reward=2.0 * is_correct - 1.0,
            advantage=None,
            rule_correct=is_correct,
        )
        responses.append(saved)
    index = (step - 1) * config.sampling.prompts_per_step + number
    return SavedGroup(
        step=step,
        prompt_index=index,
        disposition="trained",
        from_reserve=False,
        prompt=Prompt(f"random-{index}", (("user", "1+1=?"),), "2", "random"),
        prompt_ids=tuple(rng.integers(0, NUM_IDS, 8).tolist()),
        responses=tuple(responses),
    )


if __name__ == "__main__":
    *command, option = sys.argv[1:]
    config = config_of(word for word in command if word.startswith("--"))
    for step in range(1, config.run.num_steps + 1):
        numbers = range(config.sampling.prompts_per_step)
        path = step_file(Path(option.removeprefix("--replay=")), step)
        write_rollouts(path, [random_group(config, step, number) for number in numbers])
    sys.exit(kill_and_resume([*command, option]))
