"""The calculator returns Python's values, and no text of a model can harm the engine."""

import time

import pytest

from megadapo.rollout.tools import MAX_CHARS, Calculator, ToolsConfig, calculate

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
def test_values_equal_pythons(expression, value):
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
def test_other_texts_have_no_value_and_cost_no_time(text):
    """An exception would end the engine, and a tower of powers would block it."""
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
def test_without_start_text_the_last_expression_is_the_call(text, output):
    assert Calculator(UNMARKED).step(text) == output


def test_every_call_with_a_start_text_gets_an_output():
    """The last start text counts; without one, a stop string is only text."""
    calculator = Calculator(ToolsConfig(tool="calculator"))
    assert calculator.stop_strings == ("</calculator>",)
    assert calculator.step("<calculator>2*(3+4)</calculator>") == "<result>14</result>"
    assert calculator.step("<calculator>1<calculator>2+3</calculator>") == "<result>5</result>"
    assert calculator.step("<calculator>rm -rf</calculator>") == "<result>error</result>"
    assert calculator.step("2+3</calculator>") is None


@pytest.mark.parametrize("output", ['{"result": {}}', "{{}}", "{0}{}"])
def test_other_braces_in_the_output_are_text(output: str) -> None:
    """str.format would raise KeyError for them and end the engine."""
    config = ToolsConfig(tool="calculator", start="", stop="=", output=output)
    assert Calculator(config).step("1+1=") == output.replace("{}", "2")
