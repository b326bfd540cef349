"""The calculator gives Python's values, and nothing that a model writes can hurt the engine."""

from __future__ import annotations

import time

import pytest

from megadapo.errors import ConfigError
from megadapo.rollout.calculator import MAX_CHARS, Calculator, calculate
from megadapo.rollout.tools import ToolsConfig

UNMARKED = ToolsConfig(tool="calculator", start="", stop="=", output="{}")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+34", "46"),
        (" (2 - 5) * 3 ", "-9"),
        ("7/2", "3.5"),
        ("6/2", "3.0"),
        ("-7//2", "-4"),
        ("17 % 5", "2"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("0046+007", "53"),
        ("1.05*100", "105.0"),
        ("10.05+0.5", "10.55"),
    ],
)
def test_values_are_pythons(expression, value):
    """A digit lost to the stripping of zeros, or a whole quotient where Python has a float."""
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "46", "-46", "+", "12+", "(1+2", "1 2", "1.2.3+4", "2(3+4)", "1+-"),
        *("1/0", "5%0", "(-8)**0.5", "10**400*1.0", "1e5+1", "True+1", "__import__('os')+1"),
        *("9**9**9**9", "2**(10**9)", "(-3)**99999", "9" * 199 + "*9", "2.0**9999"),
        *("(" * 100 + "1+1" + ")" * 97, "1" + "+1" * MAX_CHARS, "１+１", "1+1\n", "0**-1"),
    ],
)
def test_anything_else_has_no_value_and_costs_no_time(text):
    """An exception would end the engine, a tower of powers stop it for good."""
    start = time.perf_counter()
    assert calculate(text) is None
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("12+34=", "46"),
        ("12+34=46;46+56=", "102"),
        ("so 1. 12 + 34 =", "46"),
        ("Answer: 3*4=", "12"),
        ("46=", None),
        ("x+2=", None),
        ("12+34", None),
        ("12+34=4", None),
        ("=", None),
        ("12+\n34=", None),
    ],
)
def test_without_a_mark_the_expression_before_the_stop_string_is_the_call(text, output):
    """Words before it are not of it, and a lone number is no question."""
    assert Calculator(UNMARKED).step(text) == output


def test_marked_calls_are_answered_even_where_they_make_no_sense():
    """The last mark counts; a stop string without one is only text."""
    calculator = Calculator(ToolsConfig(tool="calculator"))
    assert calculator.stop_strings == ("</calculator>",)
    assert calculator.step("<calculator>2*(3+4)</calculator>") == "<result>14</result>"
    assert calculator.step("<calculator>1<calculator>2+3</calculator>") == "<result>5</result>"
    assert calculator.step("<calculator>rm -rf</calculator>") == "<result>error</result>"
    assert calculator.step("2+3</calculator>") is None


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"stop": "="}, "rollout.tools.stop: read only"),
        ({"tool": "calculator", "stop": ""}, "rollout.tools.stop"),
        ({"tool": "calculator", "output": "result"}, "rollout.tools.output"),
        ({"tool": "python"}, "rollout.tools.tool"),
    ],
)
def test_settings_that_mean_nothing_are_refused(values, key):
    with pytest.raises(ConfigError, match=key):
        ToolsConfig(**values)


@pytest.mark.parametrize("output", ['{"result": {}}', "{{}}", "{0}{}"])
def test_other_braces_of_an_output_are_text(output: str) -> None:
    """As a format they are fields, whose KeyError ends the engine."""
    config = ToolsConfig(tool="calculator", start="", stop="=", output=output)
    assert Calculator(config).step("1+1=") == output.replace("{}", "2")
