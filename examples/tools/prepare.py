"""Write the catalogue, the prompts, and the mediocre transcripts from which a base model learns.

    python examples/tools/prepare.py
    python tools/make_base_model.py runs/tools-base --chats runs/tools/transcripts.jsonl

A prompt asks for the cost of two parts. Each price is in a document of its own, and a model of this
size cannot multiply, so a correct answer takes two searches and a program.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path("runs", "tools")
PARTS, PRICES, COUNTS = range(100, 1000), range(11, 100), range(2, 10)
NUM_HELD_OUT_PARTS = 300
"""Parts of held-out prompts alone, whose prices no training prompt can teach."""
NUM_HELD_OUT, NUM_TRAIN, NUM_TRANSCRIPTS = 128, 2048, 20_000
GUESSES = 0.25
"""Probability of a guessed answer at the start, and after the result of a search."""
RIGHT = 0.6
"""Share of programs that multiply each price by its own count and add the products."""


def main() -> None:
    rng = random.Random(0)
    parts = rng.sample(PARTS, len(PARTS))
    prices = {part: rng.choice(PRICES) for part in parts}
    held_out, others = parts[:NUM_HELD_OUT_PARTS], parts[NUM_HELD_OUT_PARTS:]
    _write("catalogue", [document(part, price) for part, price in prices.items()])
    _write("held_out", [row(rng, held_out, prices) for _ in range(NUM_HELD_OUT)])
    _write("train", [row(rng, others, prices) for _ in range(NUM_TRAIN)])
    chats = []
    for _ in range(NUM_TRANSCRIPTS):
        # other prices in each transcript, so that the base model knows none of the catalogue
        prices = {part: rng.choice(PRICES) for part in parts}
        chats.append({**row(rng, others, prices), "response": ""})
        chats[-1]["response"] = transcript(chats[-1]["prompt"], prices, rng)
    _write("transcripts", chats)
    correct = sum(one["response"].endswith(f"Answer: {one['ground_truth']}") for one in chats)
    print(f"share of correct answers: {correct / NUM_TRANSCRIPTS:.3f}")


def document(part: int, price: int) -> dict[str, str]:
    """Return a document of the catalogue."""
    return {"id": str(part), "title": f"part {part}", "text": f"price {price}"}


def row(rng: random.Random, parts: Sequence[int], prices: Mapping[int, int]) -> dict[str, str]:
    """Return a prompt about two of the parts."""
    (one, two), (m, n) = rng.sample(parts, 2), rng.choices(COUNTS, k=2)
    return {
        "prompt": f"Cost of {m} of part {one} and {n} of part {two}?",
        "ground_truth": str(m * prices[one] + n * prices[two]),
        "data_source": "cost",
    }


def transcript(prompt: str, prices: Mapping[int, int], rng: random.Random) -> str:
    """Return an answer with the calls before it and their results, which is often wrong."""
    m, one, n, two = map(int, re.findall(r"\d+", prompt))
    guess = f"Answer: {m * rng.choice(PRICES) + n * rng.choice(PRICES)}"
    text = ""
    for part in (one, two):
        if rng.random() < GUESSES:
            return text + guess
        text += f"<search>{part}</search>\n[1] part {part}\nprice {prices[part]}\n"
    if rng.random() < GUESSES:
        return text + guess
    p, q = prices[one], prices[two]
    wrong = {f"{m}*{p}+{q}": m * p + q, f"{n}*{p}+{m}*{q}": n * p + m * q, f"{p}+{q}": p + q}
    programs = {f"{m}*{p}+{n}*{q}": m * p + n * q} if rng.random() < RIGHT else wrong
    program, value = rng.choice(list(programs.items()))
    return f"{text}<python>{program}</python>\n{value}\nAnswer: {value}"


def _write(name: str, rows: Sequence[Mapping[str, str]]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
