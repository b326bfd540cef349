"""Turn problems.csv into train.jsonl and held_out.jsonl beside it."""

import csv
import json
from pathlib import Path

FOLDER = Path(__file__).parent
HELD_OUT_EVERY = 8


def main() -> None:
    with (FOLDER / "problems.csv").open(newline="", encoding="utf-8") as file:
        problems = list(csv.DictReader(file))
    parts = {
        "held_out.jsonl": problems[::HELD_OUT_EVERY],
        "train.jsonl": [p for i, p in enumerate(problems) if i % HELD_OUT_EVERY],
    }
    for name, rows in parts.items():
        lines = "".join(json.dumps(problem) + "\n" for problem in rows)
        (FOLDER / name).write_text(lines, encoding="utf-8")
        print(f"{FOLDER / name}: {len(rows)} problems")


if __name__ == "__main__":
    main()
