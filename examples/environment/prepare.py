"""Write the prompts beside this file, and mediocre games from which a base model learns to play.

    python examples/environment/prepare.py
    python tools/make_base_model.py configs/agent-base --chats runs/guess-games.jsonl

Training and held-out prompts share no pair of a range and a number.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from guess import Guess

from megadapo.environments.environment import Action, Task

FOLDER = Path(__file__).parent
GAMES = Path("runs", "guess-games.jsonl")
SIZES = range(8, 11)
"""Numbers of a range, which have the same first digit; halving finds one of 15 in 4 guesses."""
NUM_HELD_OUT, NUM_GAMES = 64, 16_000
MAX_GUESSES = 4
ASTRAY, CARELESS, HALVING = 0.02, 0.8, 0.05
"""Shares of guesses: anywhere; up to CARELESS, anywhere in the range; then near the middle of what
is possible; the others are anywhere in what is possible."""


def main() -> None:
    rng = random.Random(0)
    prompts = [
        row(first, first + size - 1, number)
        for size in SIZES
        for ten in range(10, 100, 10)
        for first in range(ten, ten + 11 - size)
        for number in range(first, first + size)
    ]
    rng.shuffle(prompts)
    held_out, others = prompts[:NUM_HELD_OUT], prompts[NUM_HELD_OUT:]
    _write(FOLDER / "held_out.jsonl", held_out)
    _write(FOLDER / "train.jsonl", others)
    games = [play(rng.choice(others), rng) for _ in range(NUM_GAMES)]
    _write(GAMES, [{"messages": messages} for messages, _ in games])
    print(f"share of games won: {sum(won for _, won in games) / NUM_GAMES:.3f}")


def row(first: int, last: int, number: int) -> dict[str, object]:
    """Return a prompt that hides a number of a range."""
    text = f"Find my number from {first} to {last}."
    # prompts with one text need a different extra_info
    return {
        "prompt": text,
        "ground_truth": str(number),
        "data_source": "guess",
        "extra_info": {"number": number},
    }


def play(prompt: dict[str, object], rng: random.Random) -> tuple[list[dict[str, str]], bool]:
    """Return the messages of a game, and whether it was won."""
    messages = [{"role": "user", "content": str(prompt["prompt"])}]
    game = Guess()
    game.reset(Task(id="", messages=messages, ground_truth=str(prompt["ground_truth"])))
    for _ in range(MAX_GUESSES):
        guess = str(guess_of(game, rng))
        observation = game.step(Action(text=guess))
        messages += [{"role": "assistant", "content": guess}, *observation.messages]
        if observation.done:
            return messages, True
    return messages[:-1], False


def guess_of(game: Guess, rng: random.Random) -> int:
    """Return the guess of a player who often forgets the answers, and sometimes the range."""
    low, high = game.possible.start, game.possible.stop - 1
    quarter, middle = (high - low + 1) // 4, (low + high) // 2
    kind = rng.random()
    if kind < ASTRAY:
        return rng.randint(10, 99)
    if kind < CARELESS:
        return rng.randint(game.first, game.last)
    if kind < CARELESS + HALVING:
        return rng.randint(middle - quarter, middle + quarter)
    return rng.randint(low, high)


def _write(path: Path, rows: Sequence[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
