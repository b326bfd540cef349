"""Recipes of runs that play the example's game, and checks of their actions and rewards."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from megadapo.observe.rollouts.files import read_rollouts, rollouts_path, saved_steps
from megadapo.observe.rollouts.saved_group import SavedGroup
from tests.support import REPOSITORY

NUM_PROMPTS = 100
NUM_HELD_OUT = 8
RESPONSES_PER_PROMPT = 4


def write_recipe(folder: Path, recovery: str = "replay", port: int | None = None) -> Path:
    """Write a recipe and its prompts; actions are counted in FOLDER/actions.

    Args:
        port: of an OpenEnv server that plays the game; None: the run plays it itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "recipe.toml"
    if recipe.exists():
        return recipe
    rows = map(json.loads, (REPOSITORY / "examples/environment/train.jsonl").open())
    lines = []
    for row in islice(rows, NUM_PROMPTS):
        # an OpenEnv server gets no prompt
        row["extra_info"]["question"] = row["prompt"]
        lines.append(json.dumps(row) + "\n")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(lines))
    (folder / "held_out.jsonl").write_text("".join(lines[:NUM_HELD_OUT]))
    game = f"""
environment = "tests.support.environments.games:CountedGuess"
options = {{log = "{folder / "actions"}"}}"""
    if port is not None:
        game = f"""
environment = "openenv"
network = true
options = {{url = "ws://127.0.0.1:{port}", field = "text", text = "text"}}"""
    recipe.write_text(f"""
[run]
seed = 1
[model]
path = "{REPOSITORY / "configs" / "agent-base"}"
dtype = "float32"
[data]
train = "{prompts}"
held_out = "{folder / "held_out.jsonl"}"
max_prompt_tokens = 40
overlap = "warn"
[rollout]
max_response_tokens = 160
max_num_seqs = 64
kv_cache_gib = 0.125
[[rollout.environments]]{game}
name = "Guess"
max_turns = 4
recovery = "{recovery}"
[reward]
functions = [{{ function = "environment", right_above = 0.0 }}]
max_failed_share = 0.9
[sampling]
responses_per_prompt = {RESPONSES_PER_PROMPT}
selection = "all"
[algorithm]
overlong_buffer = 0
[trainer]
tokens_per_micro_batch = 4096
[trainer.optimizer]
lr = 3e-5
[evaluation]
samples_per_problem = 2
[observe]
saved_groups = "all"
""")
    return recipe


def repeated_actions(folder: Path) -> list[str]:
    """Return each action that was done more than once, as EPISODE/TURN."""
    counted = Counter((folder / "actions").read_text().split())
    return [action for action, count in counted.items() if count > 1]


def wrong_rewards(run: Path) -> tuple[int, list[str]]:
    """Return how many responses of a run failed and were left out, and each false reward.

    A reward is false if the game does not give it for the text of a turn, or if a response that
    failed has one, or counts in the mean of its group.
    """
    num_left_out, problems = 0, []
    for step in saved_steps(run):
        for group in read_rollouts(rollouts_path(run, step)):
            num_left_out += len(group.failures)
            found = _wrong_rewards(group)
            problems += [f"step {step}, prompt {group.prompt_index}: {text}" for text in found]
    return num_left_out, problems


def _wrong_rewards(group: SavedGroup) -> Iterator[str]:
    num_all = len(group.responses) + len(group.failures)
    if num_all != RESPONSES_PER_PROMPT:
        yield f"{num_all} of {RESPONSES_PER_PROMPT} responses"
    for saved in group.responses:
        response = saved.response
        if response.failure is not None or response.finish_reason in ("failed", "unfinished"):
            yield f"a response that {response.finish_reason} has a reward"
        start = 0
        for number, turn in enumerate(response.turns):
            pieces = zip(saved.tokens, response.is_sampled, strict=True)
            said = "".join(text for text, sampled in list(pieces)[start : turn.end] if sampled)
            guesses = re.findall(r"[0-9]{1,9}", said)
            if turn.reward != float(guesses[-1:] == [group.prompt.ground_truth]):
                yield f"reward {turn.reward} for turn {number}: {said!r}"
            start = turn.end
        if saved.score.reward != response.episode_return:
            yield f"reward {saved.score.reward} for a return of {response.episode_return}"
    given = [saved.advantage for saved in group.responses if saved.advantage is not None]
    if abs(math.fsum(given)) > 1e-6:
        yield f"advantages of a sum of {math.fsum(given)}: the mean is not the responses' own"
