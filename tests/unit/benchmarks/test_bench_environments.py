"""`benchmarks/environments.py`: its ratios, and a small one on a real engine."""

import json
import subprocess
import sys

import pytest
from environments import AT_ONCE, SINGLE, SLOW, main, means

from megadapo.errors import ConfigError
from tests.support import REPOSITORY


def measured(speed: float, busy: float) -> dict[str, float]:
    return {"tokens_per_second": speed, "busy_share": busy}


def test_ratios_compare_the_ways_of_one_round():
    """A machine that gets slower from round to round changes no ratio; a ratio of means would."""
    rounds = [
        {AT_ONCE: measured(100.0, 1.0), SLOW: measured(90.0, 0.9)},
        {AT_ONCE: measured(10.0, 0.5), SLOW: measured(8.0, 0.5)},
    ]
    slow = means(rounds, SLOW)
    assert slow["tokens_per_second"] == pytest.approx(49.0)
    assert slow["tokens_per_second_ratio"] == pytest.approx(0.85)
    assert slow["tokens_per_second_ratio_standard_error"] == pytest.approx(0.05)
    assert slow["busy_share_ratio"] == pytest.approx(0.95)
    assert means(rounds, AT_ONCE)["tokens_per_second_ratio"] == 1.0


@pytest.mark.parametrize("word", ["--slots=0", "--rounds=0", "--delay=-1", "--hidden=100"])
def test_impossible_settings_are_refused_before_a_model_is_made(word):
    with pytest.raises((ConfigError, SystemExit)) as refused:
        main([word])
    assert 2 in (getattr(refused.value, "code", 0), getattr(refused.value, "exit_code", 0))


@pytest.mark.full
def test_conversations_have_the_same_tokens_and_read_earlier_turns_from_the_cache(tmp_path):
    """The benchmark itself compares the tokens, which waiting must not change.

    With half as many slots as conversations, responses that wait must leave theirs to others: else
    the waits of each slot add up, and the slow run takes longer than this limit.
    """
    sizes = "--conversations=8 --turns=3 --tokens=32 --layers=2 --hidden=64 --rounds=1 --delay=1.5"
    path = tmp_path / "bench.json"
    script = str(REPOSITORY / "benchmarks" / "environments.py")
    command = [sys.executable, script, "--slots=2", *sizes.split(), "--json", str(path)]
    subprocess.run(command, check=True)
    (measured_round,) = json.loads(path.read_text())["rounds"]
    at_once, slow, single = (measured_round[way] for way in (AT_ONCE, SLOW, SINGLE))
    assert at_once["tokens"] == slow["tokens"] >= single["tokens"] > 0
    assert at_once["turns"] == slow["turns"] > single["turns"] == 8
    waited = slow["mean_waiting"] * slow["seconds"]
    assert waited >= 1.5 * slow["turns"]
    # if waiting responses kept their slots, two at a time would wait
    assert slow["seconds"] - at_once["seconds"] < 0.75 * waited / 2
    # a turn begins with the full blocks of all earlier ones
    assert at_once["tokens_from_cache"] == slow["tokens_from_cache"] > single["tokens_from_cache"]
    assert at_once["tokens_read"] == slow["tokens_read"] > single["tokens_read"]
