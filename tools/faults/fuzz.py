"""Gives the commands fuzzed configurations, data, model folders and run folders.

    python tools/faults/fuzz.py [--seed 0] [--cases 500]

No case may end in a traceback or take longer than `LIMIT_S`, and none may change a file that was
there before it. Every error is a few lines. The seed and the number of a case repeat it:
--seed 0 --only 17.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))

from megadapo.cli import main as megadapo  # noqa: E402
from megadapo.config import load_config, to_dict  # noqa: E402
from tests.support.runs.recorded_runs import record_run  # noqa: E402

LIMIT_S = 120
MAX_LINES = 60
"""Most lines of an error; a configuration has a line for each wrong key."""
QUICKSTART = str(REPOSITORY / "configs" / "quickstart.toml")
MODEL = REPOSITORY / "configs" / "quickstart-base"
ODD: list[Any] = [
    *(None, True, -1, 0, 1, 7, 2**31, 2**63, 10**400, -(10**30), 0.5, -0.0, 1e-320, 1e308),
    *("", "none", "auto", "a\0b", "\ud800", "é\u202e", "x" * 5000, "/dev/null", "..", "~", "1e999"),
    *([], [[]], {}, {"": 1}, {"a\0": {"b": [1]}}, [None], [1, "a"], ["rule"] * 50),
    json.loads("[" * 60 + "]" * 60),
]
TEMPLATES = (
    *("{% for i in range(10 ** 9) %}x{% endfor %}", "{{ 1 / 0 }}", "{{ messages[99].content.x }}"),
    *("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% if %}", "{{ messages }}", ""),
)
ROWS: list[dict[str, Any]] = [
    {"question": "1+2=?", "answer": "3"},
    {"question": "1" * 3_000_000, "answer": "3"},
    {"prompt": [{"role": "user", "content": "1+2=?"}], "response": "3", "answer": "3"},
    {"prompt": "1+2=?", "chosen": "3", "rejected": "4", "extra_info": {"index": 1}},
]


class TooLongError(Exception):
    """A case took longer than its limit."""


def fuzz_config(rng: random.Random, folder: Path) -> list[list[str]]:
    """Write a recipe with odd values, or one with damaged text."""
    recipe = folder / rng.choice(["recipe.json", "recipe.toml"])
    table = to_dict(load_config(QUICKSTART))
    for _ in range(rng.randint(1, 3)):
        set_somewhere(rng, table)
    recipe.write_text(json.dumps(table))
    if recipe.suffix == ".toml":
        first = rng.choice(["", 'extends = "/dev/zero"\n', f"run.num_steps = {'9' * 5000}\n"])
        recipe.write_bytes(first.encode() + damaged(rng, Path(QUICKSTART).read_bytes()))
    key = f"--{rng.choice(list(table))}.{rng.choice(['folder', 'path', 'train', 'seed'])}"
    override = f"{key}={json.dumps(rng.choice(ODD))}".replace("\0", "")
    options = [[], [], [override], [override], ["--accept-changes", "bogus.key"]]
    command = rng.choice(["train", "sft", "reward-model"])
    return [[command, str(recipe), "--dry-run", *rng.choice(options)]]


def fuzz_data(rng: random.Random, folder: Path) -> list[list[str]]:
    """Write a file of rows with odd values or damage, or something that is no file of rows."""
    rows = copy.deepcopy(rng.choices(ROWS, k=rng.randint(1, 3)))
    for row in rows * rng.randint(0, 2):
        set_somewhere(rng, row)
    file = folder / rng.choice(["rows.jsonl", "rows.jsonl", "rows.parquet", "rows", "rows.txt"])
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    place(rng, file, content if rng.random() < 0.6 else damaged(rng, content))
    command = rng.choice(["train", "sft", "reward-model"])
    return [[command, QUICKSTART, "--dry-run", f"--data.train={file}"]]


def fuzz_model(rng: random.Random, folder: Path) -> list[list[str]]:
    """Write a model's folder with odd settings or damaged files."""
    model = folder / "model"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text())
    for _ in range(rng.randint(0, 2)):
        set_somewhere(rng, config)
    (model / "config.json").write_text(json.dumps(config))
    if rng.random() < 0.3:
        ends = json.dumps({"eos_token_id": rng.choice([*ODD, -5, [-5], [0, "a"]])})
        (model / "generation_config.json").write_text(ends)
    if rng.random() < 0.3:
        (model / "chat_template.jinja").write_text(rng.choice(TEMPLATES))
    if rng.random() < 0.6:
        file = rng.choice(sorted(path for path in model.iterdir() if path.name != "README.md"))
        place(rng, file, damaged(rng, file.read_bytes()))
    train = ["train", QUICKSTART, "--dry-run", f"--model.path={model}"]
    convert = ["convert", "hf-to-megatron", str(model), str(folder / "made")]
    return [rng.choice([train, train, ["convert", "inspect", str(model)], convert])]


def fuzz_run(rng: random.Random, folder: Path) -> list[list[str]]:
    """Write a run's folder of which some files are damaged."""
    run = record_run(folder / "run", num_steps=3)
    (run / "config.json").write_text(json.dumps(to_dict(load_config(QUICKSTART))))
    more = ("rollouts/step-1.jsonl.zst", "checkpoints/step-2/manifest.json")
    for name in (*more, *rng.choices(["status.json", "schedule.log", "log.txt"], k=2)):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("{}")
    files = sorted(path for path in run.rglob("*") if path.is_file())
    for file in rng.sample(files, k=rng.randint(1, 3)):
        place(rng, file, damaged(rng, file.read_bytes()))
    name, out = str(run), str(folder / "out")
    commands = [
        *(
            ["status", name],
            ["show", name],
            ["report", name, "--output", out],
            ["diff", name, name],
        ),
        *(["plot", name, "--output", out], ["top", name, "--once"], ["engines", name]),
        *(["export", name, out], ["train", name, "--dry-run"], ["whatif", name, "--step", "1"]),
    ]
    return rng.sample(commands, k=4)


def set_somewhere(rng: random.Random, table: dict[str, Any]) -> None:
    """Set a key of a nested table, or a new one, to an odd value."""
    inner: Any = table
    while isinstance(inner, dict) and inner:
        key = rng.choice([*inner, "new"])
        if not isinstance(inner.get(key), dict) or rng.random() < 0.2:
            inner[key] = copy.deepcopy(rng.choice(ODD))
            return
        inner = inner[key]


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Return bytes that are cut, changed in places, or others altogether."""
    kind, length = rng.randrange(4), len(content)
    if kind == 0:
        return content[: rng.randint(0, length)]
    if kind == 1 and length:
        changed = bytearray(content)
        for _ in range(rng.randint(1, 20)):
            changed[rng.randrange(length)] = rng.randrange(256)
        return bytes(changed)
    return rng.randbytes(40) if kind == 2 else json.dumps(rng.choice(ODD)).encode()


def place(rng: random.Random, file: Path, content: bytes) -> None:
    """Write a file, or a folder or a broken link in its place."""
    kind = rng.randrange(8)
    file.unlink(missing_ok=True)
    if kind == 0:
        file.mkdir()
    elif kind == 1:
        file.symlink_to("nowhere")
    else:
        file.write_bytes(content)


def stop(number: int, frame: object) -> None:
    raise TooLongError(f"more than {LIMIT_S} s")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def problem_of(arguments: Sequence[str], folder: Path) -> str | None:
    """Run a command in this process; return what is wrong with its end, None if nothing is."""
    before, said = contents(folder), io.StringIO()
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            megadapo(arguments)
    except SystemExit:
        pass
    except Exception:  # the report of this script: any exception is a finding
        return traceback.format_exc(limit=-4)
    finally:
        signal.alarm(0)
    after = contents(folder)
    if lost := [str(path) for path in before if after.get(path) != before[path]]:
        return f"changed {', '.join(lost)}"
    return said.getvalue()[:2000] if said.getvalue().count("\n") > MAX_LINES else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases; return 1 if one of them has a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--only", type=int)
    options = parser.parse_args(arguments)
    kinds = (fuzz_config, fuzz_data, fuzz_model, fuzz_run)
    num_problems = 0
    for number in range(options.cases) if options.only is None else [options.only]:
        rng = random.Random(f"{options.seed}/{number}")
        with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
            for words in kinds[number % len(kinds)](rng, Path(name)):
                folder = [f"--run.folder={name}/new"] if "--dry-run" in words else []
                if problem := problem_of([*words, *folder], Path(name)):
                    num_problems += 1
                    print(
                        f"case {number}: megadapo {' '.join(words)!r:.300}\n{problem}", flush=True
                    )
    print(f"{num_problems} problems with seed {options.seed}")
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
