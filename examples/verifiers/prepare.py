"""Write the tasks of a verifiers taskset as prompts; run it with the Python that has verifiers.

    python prepare.py recipe.toml prompts.jsonl [NUM]

The recipe's environment "verifiers" names the taskset in its options.
"""

import itertools
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import verifiers.v1 as vf


def main(recipe: str, file: str, num: str = "") -> None:
    entries = tomllib.loads(Path(recipe).read_text())["rollout"]["environments"]
    [options] = [one["options"] for one in entries if one["environment"] == "verifiers"]
    config = vf.resolve_env_config(options["env"])
    # a taskset may be endless
    tasks = itertools.islice(vf.load_taskset(config.taskset), int(num) if num else None)
    rows = [row(config.env_id, task.data) for task in tasks]
    Path(file).write_text("".join(json.dumps(one) + "\n" for one in rows))
    print(f"{file}: {len(rows)} prompts")


def row(name: str, data: vf.TaskData) -> dict[str, Any]:
    """Return a task as a prompt: what the model reads first, and what verifiers needs of it."""
    if data.prompt is None:
        raise SystemExit(f"task {data.idx} has no prompt: its environment opens the conversation")
    system = data.system_prompt
    messages = [] if system is None else [{"role": "system", "content": system}]
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    else:
        messages += [{"role": one.role, "content": one.content} for one in data.prompt]
    if not all(isinstance(one["content"], str) for one in messages):
        raise SystemExit(f"task {data.idx} has images, which prompts do not have")
    task = data.model_dump(mode="json", exclude_none=True)
    return {
        "prompt": messages,
        "ground_truth": "",
        "data_source": name,
        "extra_info": {"task": task},
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
