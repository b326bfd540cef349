"""Reward functions as users write them, good and bad: what tests name in reward.functions."""

import asyncio
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np


def digits(messages, response, tokens, ground_truth, extra_info):
    """Everything that a function is given comes back as a part."""
    return {
        "score": sum(character.isdigit() for character in response),
        "correct": response == ground_truth,
        "tokens": len(tokens),
        "turns": len(messages),
        "from_test": extra_info["data_source"] == "test",
        "index": extra_info.get("index", -1),
    }


def scaled(messages, response, tokens, ground_truth, extra_info, *, factor):
    return factor * len(response)


def in_batches(messages, responses, tokens, ground_truths, extra_infos):
    return [float(len(responses)) for _ in zip(messages, tokens, ground_truths, strict=True)]


async def later(messages, response, tokens, ground_truth, extra_info):
    """All responses of a group wait at the same time; one of them for ever."""
    if response == "raise":
        raise ValueError("no")
    await asyncio.sleep(60 if response == "hang" else 0.3)
    return 1.0


async def batches_later(messages, responses, tokens, ground_truths, extra_infos):
    await asyncio.sleep(0)
    return [2.0] * len(responses)


def returns(response):
    """Returns the kind of value that the response names."""
    return {
        "0-d array": np.array(0.5, dtype=np.float32),
        "decimal": Decimal("0.5"),
        "fraction": Fraction(1, 2),
        "true": True,
        "numpy bool": np.bool_(True),
        "acc": {"score": 1.0, "acc": True},
        "acc of tests": {"score": 0.4, "acc": 0.4, "pred": "34", "all": [1, 2], "none": None},
        "only correct": {"correct": np.bool_(True)},
        "no verdict": {"score": 1.0, "correct": None},
        "none": None,
    }[response]


def by_level(level, response):
    return level * len(response)


def none_for_all(completions, **kwargs):
    return np.array([None] * len(completions))


def sometimes_fp32(response):
    return {"fp32": float(np.float32(1 / 3)), "half": 0.5}.get(response, 1 / 3)


def too_few(messages, responses, tokens, ground_truths, extra_infos):
    return [1.0]


class Unreadable(Exception):
    """An object without text and truth, as an array of several values has no truth."""

    def __str__(self) -> str:
        raise ValueError("unreadable")

    @property
    def item(self) -> float:
        raise ValueError("unreadable")


def hostile(messages, response, tokens, ground_truth, extra_info):
    """Does what the response says."""
    match response:
        case "raise":
            raise ValueError("no such answer")
        case "hang":
            while True:
                pass
        case "sleep":
            time.sleep(60)
        case "nan":
            return float("nan")
        case "list":
            return [1.0]
        case "two numbers":
            return np.zeros(2)
        case "text as correct":
            return {"score": 1.0, "correct": "False"}
        case "nan as correct":
            return {"score": 1.0, "correct": float("nan")}
        case "half correct":
            return {"score": 1.0, "correct": 0.5}
        case "no score":
            return {"format": 1.0}
        case "part":
            return {"score": 1.0, "format": float("inf")}
        case "print":
            for _ in range(1 << 10):
                print("x" * (1 << 20))
        case "stderr":
            for _ in range(1 << 10):
                os.write(2, b"x" * (1 << 20))
        case "memory":
            return len(bytearray(1 << 34))
        case "fork":
            os.fork()
        case "spawn":
            context = multiprocessing.get_context("spawn")
            context.Process(target=time.sleep, args=(60,)).start()
        case "subprocess":
            subprocess.run(["sleep", "60"], check=True)
        case "socket":
            socket.create_connection(("127.0.0.1", 9), timeout=1)
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(3)
        case "die slowly":
            os.closerange(3, 64)
            time.sleep(0.2)
            os._exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "no text":
            raise Unreadable
        case "no truth":
            return {"score": 1.0, "correct": Unreadable()}
        case "segfault":
            os.kill(os.getpid(), 11)
    return 1.0


def leaves_a_child(messages, response, tokens, ground_truth, extra_info):
    """Starts a process, says which, and hangs."""
    child = subprocess.Popen(["sleep", "600"])
    Path(extra_info["file"]).write_text(str(child.pid))
    time.sleep(60)


def secret(messages, response, tokens, ground_truth, extra_info):
    return float("SECRET" in os.environ) + 2.0 * ("SHOWN" in os.environ)


NOT_A_FUNCTION = 3


def steps(messages, response, tokens, ground_truth, extra_info):
    """Returns what the response names as its steps."""
    if response == "grow":
        tokens.extend(range(10))
    given = {
        "string": "abc",
        "none": [],
        "too few": [1.0],
        "nan": [0.0, float("nan")],
        "mixed": [0.0, (0, 1, 1.0)],
        "pair": [(0, 1)],
        "float": [(0.0, 1, 1.0)],
        "empty": [(1, 1, 1.0)],
        "behind": [(0, 4, 1.0), (4, 99, 1.0)],
        "before": [(-1, 2, 1.0)],
        "overlap": [(0, 3, 1.0), (2, 4, 1.0)],
        "order": [(3, 4, 1.0), (0, 2, 1.0)],
        "nan span": [(0, 3, float("nan"))],
        "huge": [(0, 1, 1e308), (1, 2, 1e308)],
        "grow": [(0, 14, 1.0)],
    }
    return {"steps": given.get(response, [(0, 2, 1.0), (3, 4, 0.5)])}


def each_step(messages, responses, tokens, ground_truths, extra_infos):
    """The length of each line, in words."""
    return [{"steps": [len(line.split()) for line in text.split("\n")]} for text in responses]
