"""Write the prompts beside this file, and mediocre games from which a base model learns to play.

    python examples/environment/prepare.py
    python tools/make_base_model.py configs/agent-base --chats runs/guess-games.jsonl

Training and held-out prompts share no range.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from guess import Guess

from megadapo.environments.environment import Action, Task

FOLDER = Path(__file__).parent
GAMES = Path("runs", "guess-games.jsonl")
SIZES = range(12, 16)
"""Numbers of a range; halving finds one of 15 in 4 guesses."""
NUM_HELD_OUT, NUM_TRAIN, NUM_GAMES = 64, 1024, 16_000
MAX_GUESSES = 4
WITH_NOTES = 0.2
"""Share of games whose player notes what is still possible; the others guess anywhere."""


def main() -> None:
    rng = random.Random(0)
    ranges = [(low, low + size - 1) for size in SIZES for low in range(10, 101 - size)]
    rng.shuffle(ranges)
    held_out = [row(low, high, rng.randint(low, high)) for low, high in ranges[:NUM_HELD_OUT]]
    others = [
        row(low, high, number)
        for low, high in ranges[NUM_HELD_OUT:]
        for number in range(low, high + 1)
    ]
    rng.shuffle(others)
    _write(FOLDER / "held_out.jsonl", held_out)
    _write(FOLDER / "train.jsonl", others[:NUM_TRAIN])
    games = [play(rng.choice(others), rng) for _ in range(NUM_GAMES)]
    _write(GAMES, [{"messages": messages} for messages, _ in games])
    print(f"share of games won: {sum(won for _, won in games) / NUM_GAMES:.3f}")


def row(first: int, last: int, number: int) -> dict[str, object]:
    """Return a prompt that hides a number of a range."""
    text = f"Find my number from {first} to {last}."
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
    with_notes = rng.random() < WITH_NOTES
    for _ in range(MAX_GUESSES):
        text = turn_with_notes(game, rng) if with_notes else str(rng.randint(game.first, game.last))
        observation = game.step(Action(text=text))
        messages += [{"role": "assistant", "content": text}, *observation.messages]
        if observation.done:
            return messages, True
    return messages[:-1], False


def turn_with_notes(game: Guess, rng: random.Random) -> str:
    """Return what is still possible, and a guess from the middle half of it."""
    low, high = game.possible.start, game.possible.stop - 1
    quarter = (high - low + 1) // 4
    return f"from {low} to {high}: {rng.randint(low + quarter, high - quarter)}"


def _write(path: Path, rows: Sequence[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
