"""Time of reading responses: linear in their length, as a regular expression stops all threads."""

import time

import pytest

from megadapo.observe.metrics.reflection import reflection_shares
from megadapo.rewards.builtin import format_reward
from megadapo.rewards.dapo_math import extract_answer, score
from megadapo.rewards.steps import split_steps
from megadapo.rewards.unit_tests import program_of, same_output
from megadapo.rewards.verifier import refusal

SIZE = 10**6
HOSTILE = {
    "spaces after a fence": "```" + " " * SIZE,
    "blank lines after a fence": "```" + "\n" * SIZE,
    "language and tabs": "```python" + "\t" * SIZE,
    "fences": "```" * (SIZE // 3),
    "open fences": "```\n" + "`` ```py" * (SIZE // 8),
    "backticks and a line": "`" * SIZE + "\n",
    "answers": "Answer:" * (SIZE // 7),
    "answer and spaces": "Answer" + " " * SIZE,
    "phrases": "let  " * (SIZE // 5),
}
READERS = {
    "program": program_of,
    "rule": lambda text: score(text, "42", "answer_or_boxed"),
    "answer": lambda text: extract_answer(text, "answer_or_boxed"),
    "symbolic": refusal,
    "json": lambda text: format_reward((), text, (), "", {}, json_keys=["x"]),
    "steps": lambda text: split_steps(text, ["\n\n", "\n"]),
    "output": lambda text: same_output(text, "42"),
    "reflection": lambda text: reflection_shares([text], ["let me check"]),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", HOSTILE)
def test_a_megabyte_is_read_in_a_moment(reader: str, text: str) -> None:
    """A pattern of quadratic time takes minutes, in which a supervisor kills the driver."""
    started = time.thread_time()
    READERS[reader](HOSTILE[text])
    assert time.thread_time() - started < (0.1 if reader == "program" else 2.0)
