"""The calculator returns Python's values, and finds calls in any text that a model can write."""

import time

import pytest

from megadapo.environments.adapters.calculator import MAX_CHARS, Calculator, Mark, calculate
from megadapo.environments.environment import Action, Observation

NO_CALL = Observation(text="", is_call=False)
END = Observation(done=True)


def call(text: str) -> Observation:
    """Return the observation of a call whose output is this text."""
    return Observation(text=text, metrics={"calls": 1.0})


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
    ("text", "with_start", "without"),
    [
        ("<calculator>2*(3+4)</calculator>", "14", "14"),
        ("<calculator>1<calculator>2+3</calculator>", "5", "5"),
        ("<calculator>rm -rf</calculator>", "error", None),
        ("<calculator></calculator>", "error", None),
        ("<calculator>１+１</calculator>", "error", None),
        ("2+3</calculator>", None, "5"),
        ("</calculator>", None, None),
        ("<calculator>1+1</calculator><result>2</result> 3", None, None),
        ("<calculator>1+1</calculator></calculator>", "error", None),
        ("12+34=</calculator>", None, None),
    ],
)
def test_calls_are_found_before_the_stop_text(text, with_start, without):
    for start, result in (("<calculator>", with_start), ("", without)):
        calculator = Calculator(start=start, output='{"result": {}}')
        expected = NO_CALL if result is None else call(f'{{"result": {result}}}')
        assert calculator.step(Action(text=text)) == expected


@pytest.mark.parametrize("text", ["<calculator>1+1", "", "2+3"])
def test_turn_without_the_stop_text_is_the_end(text):
    assert Calculator().step(Action(text=text)) == END


def test_mark_observes_nothing_after_its_stop_text_and_ends_with_the_turn() -> None:
    mark = Mark(stop=";")
    assert mark.stop == (";",)
    assert mark.step(Action(text="46;")) == call("")
    assert mark.step(Action(text="46; and")) == NO_CALL
    assert mark.step(Action(text="46")) == END


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": ""}, "stop is empty"),
        ({"output": "{}{}"}, "must contain {} once"),
        ({"output": "result"}, "must contain {} once"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Calculator(**options)
