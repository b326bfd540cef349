"""Unit tests as gold answers: tests that cannot be used, or a program that is not found."""

import json

import pytest

from megadapo.errors import DataError
from megadapo.rewards.config import RewardConfig
from megadapo.rewards.unit_tests import UnitTests, program_of, read_tests, same_output


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("", "no unit tests"),
        ("assert (", "not Python"),
        ("x = 3", "assert nothing"),
        ("{", "cannot be read"),
        ('{"inputs": []}', "cannot be read"),
        ('{"inputs": [1], "outputs": ["1"]}', "lists of texts"),
        ('{"inputs": ["1", "2"], "outputs": ["1"]}', "2 inputs for 1 outputs"),
        ('{"fn_name": "f", "inputs": ["1"], "outputs": ["1"]}', "have fn_name"),
        ('{"inputs": [], "outputs": []}', "0 inputs for 0"),
    ],
)
def test_invalid_unit_tests_fail_at_load(gold: str, message: str) -> None:
    config = RewardConfig(functions=("python_tests",))
    assert config.check_gold("assert f() == 1", "code") == "assert f() == 1"
    with pytest.raises(DataError, match=message):
        config.check_gold(gold, "code")


@pytest.mark.parametrize(
    "response",
    [
        "```text\n3\n```\n```python\na\n```",
        "```python\na\n```\nIt prints:\n```\n1\n```\n",
        "```Python3\na\n```",
        '```py title="a.py"\r\na\r\n```\r\n',
        "1. So:\n   ```python\n   a\n   ```\n",
    ],
)
def test_program_is_found_among_other_blocks(response: str) -> None:
    """Otherwise a right program is scored as none, or as the text between two blocks."""
    assert program_of(response) == "a\n"


def test_fences_inside_a_program_do_not_end_it() -> None:
    """Otherwise a program that prints a fence, or has one in a docstring, is cut off."""
    program = "print('```')\ndef f():\n    '''\n    ```\n    '''\n"
    assert program_of(f"```python\n{program}```") == program


def test_programs_tests_and_outputs_are_read() -> None:
    assert program_of("```python\na\n```\n```py\nb\n```") == "b\n"
    assert program_of("```\na\n```") == "a\n" and program_of("a") is None
    adds = json.dumps({"inputs": ["1 2", "30 4"], "outputs": ["3\n", "34"]})
    assert read_tests(adds) == UnitTests(None, ("1 2", "30 4"), ("3\n", "34"))
    assert same_output("1 \n2\n\n", "1\n2") and not same_output("1 2", "12")
