"""Recipes of runs with an environment, on the quickstart's model with a chat template."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

from tests.support import REPOSITORY

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_recipe(folder: Path, recovery: str = "replay") -> Path:
    """Write a recipe, its model and its prompts; actions are counted in FOLDER/actions."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "recipe.toml"
    if recipe.exists():
        return recipe
    model = folder / "model"
    shutil.copytree(REPOSITORY / "configs" / "quickstart-base", model)
    settings = model / "tokenizer_config.json"
    changed = json.loads(settings.read_text()) | {"chat_template": TEMPLATE}
    settings.write_text(json.dumps(changed))
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "ground_truth": str(a + b),
            "data_source": "sum",
        }
        for a in range(10)
        for b in range(10)
    ]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe.write_text(f"""
[run]
seed = 1
[model]
path = "{model}"
dtype = "float32"
[data]
train = "{prompts}"
held_out = "{prompts}"
max_prompt_tokens = 40
overlap = "warn"
[rollout]
max_response_tokens = 96
max_num_seqs = 64
kv_cache_gib = 0.125
[[rollout.environments]]
environment = "tests.support.environments.games:Sum"
options = {{log = "{folder / "actions"}"}}
max_turns = 3
recovery = "{recovery}"
[reward]
functions = ["environment"]
[sampling]
responses_per_prompt = 4
selection = "all"
[algorithm]
overlong_buffer = 16
[trainer]
tokens_per_micro_batch = 4096
[trainer.optimizer]
lr = 3e-5
""")
    return recipe


def repeated_actions(folder: Path) -> list[str]:
    """Return each action that was done more than once, as EPISODE/TURN."""
    counted = Counter((folder / "actions").read_text().split())
    return [action for action, count in counted.items() if count > 1]
