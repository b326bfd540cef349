"""`megadapo rollout` shows the author of an environment what its episodes do, without a trainer."""

import json
import re
import shutil

import pytest

from megadapo.observe.rollouts.files import read_rollouts, rollouts_path
from tests.support import REPOSITORY
from tests.support.runs.whole_runs import megadapo

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
RECIPE = """
[run]
folder = "{folder}/game"
num_steps = 1
seed = 1

[model]
path = "{folder}/base"
dtype = "float32"

[data]
train = "{folder}/sums.jsonl"
max_prompt_tokens = 32

[rollout]
max_response_tokens = 128
max_num_seqs = 32
kv_cache_gib = 0.0625
num_engines = 1
num_threads = 1

[[rollout.environments]]
environment = "tests.support.environments.games:OddSum"
name = "Sum"

[sampling]
prompts_per_step = 6
responses_per_prompt = 2
selection = "all"

[reward]
functions = [{{ function = "environment", right_above = 0.0 }}]
max_failed_share = 0.9

[algorithm]
responses_per_mini_batch = 12
overlong_buffer = 0

[observe]
saved_groups = "all"

[evaluation]
every = 0
"""


def recipe(folder):
    """Write a recipe whose environment fails on prompts with an even sum."""
    base = folder / "base"
    shutil.copytree(REPOSITORY / "configs" / "quickstart-base", base)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    text = json.dumps(settings | {"chat_template": TEMPLATE})
    (base / "tokenizer_config.json").write_text(text)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "ground_truth": str(a + b),
            "data_source": "sum",
        }
        for a in range(1, 9)
        for b in range(1, 5)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(folder=folder))
    return path


def test_rollout_shows_episodes_failures_and_prints(tmp_path):
    """Catches an environment whose failures, prints or turns its author cannot see."""
    said = megadapo("rollout", recipe(tmp_path), "--steps=1").stdout
    assert re.search(r"^environment Sum: .*\bfailed=0\.\d+ .*\breturn=", said, re.MULTILINE), said
    warning = re.search(
        r"^environment Sum failed on (\d+) responses, which were left out or requested again: "
        r"(\d+) x "
        r"exception: ValueError: no sum of (\d+) \(games\.py, line \d+\)",
        said,
        re.MULTILINE,
    )
    assert warning, said
    folder = tmp_path / "game-rollout"
    groups = list(read_rollouts(rollouts_path(folder, 1)))
    responses = [saved.response for group in groups for saved in group.responses]
    played = [one for one in groups if any(saved.response.turns for saved in one.responses)]
    assert len(groups) == 6 and played
    assert all(int(one.prompt.ground_truth) % 2 for one in played)
    turns = [turn for response in responses for turn in response.turns]
    assert all(turn.seconds > 0 for turn in turns)
    shown = megadapo("show", folder).stdout
    assert shown.count("  turn 1: ") == sum(bool(response.turns) for response in responses)
    assert shown.count("  Sum: ") == len(turns)
    assert re.search(r"<\|endoftext\|>\s*\n  Sum: \d+ tokens, reward \+[01], ", shown), shown
    assert "    user: wrong, try again<|endoftext|>assistant:" in shown
    assert "asked for" in (folder / "logs" / "environment-Sum.log").read_text()
