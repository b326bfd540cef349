"""Would catch: a wrong key, type or value that is accepted, or reported without its name."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from megadapo.config.schema import OverrideValue, build, known_keys, to_dict, to_toml
from megadapo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    lr: float = 1e-6
    bounds: tuple[float, float] = (0.2, 0.28)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ConfigError(f"outer.inner.lr = {self.lr} is negative")


@dataclass(frozen=True, kw_only=True)
class Outer:
    folder: Path
    size: int = 1
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    limit: float | None = 3.0
    resume: Literal["auto"] | int = "auto"
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True, kw_only=True)
class Root:
    outer: Outer
    extra: Inner | None = None


def problems(toml: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build(Root, tomllib.loads(toml))
    return str(caught.value).splitlines()


def only_problem(toml: str) -> str:
    found = problems(toml)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("size = 1.0", "outer.size: expected int, found float 1.0"),
        ("size = true", "outer.size: expected int, found bool true"),
        ('size = "1"', 'outer.size: expected int, found str "1"'),
        ("size = []", "outer.size: expected int, found a list"),
        ("size = {}", "outer.size: expected int, found a table"),
        ("size = 2020-01-01", "outer.size: expected int, found date"),
        ("size = 'none'", 'outer.size: expected int, found str "none"'),
        ("flag = 1", "outer.flag: expected bool, found int 1"),
        ("flag = 'true'", 'outer.flag: expected bool, found str "true"'),
        ("kind = 'c'", 'outer.kind: expected one of "a", "b", found str "c"'),
        ("kind = ['a']", 'outer.kind: expected one of "a", "b", found a list'),
        ("limit = 'x'", 'outer.limit: expected float or "none", found str "x"'),
        ("limit = false", 'outer.limit: expected float or "none", found bool false'),
        ("resume = 1.5", 'outer.resume: expected one of "auto" or int, found float 1.5'),
        ("inner = 3", "outer.inner: expected a table, found int 3"),
        ("inner = []", "outer.inner: expected a table, found a list"),
        ("inner.lr = '1e-6'", 'outer.inner.lr: expected float, found str "1e-6"'),
        ("inner.lr = -1", "outer.inner.lr = -1.0 is negative"),
        ("inner.bounds = [0.2]", "outer.inner.bounds: expected 2 entries, found 1"),
        (
            "inner.bounds = [0.2, true]",
            "outer.inner.bounds: entry 1: expected float, found bool true",
        ),
        ("inner.bounds = 0.2", "outer.inner.bounds: expected a list of float, found float 0.2"),
        ("inner.names = ['a', 3]", "outer.inner.names: entry 1: expected str, found int 3"),
    ],
)
def test_wrong_value_is_named_with_what_was_expected_and_found(line: str, message: str) -> None:
    assert only_problem(f"[outer]\nfolder = 'x'\n{line}") == message


@pytest.mark.parametrize(
    ("number", "said"), [("nan", "nan"), ("inf", "inf"), ("-inf", "inf"), ("1" + "0" * 400, "inf")]
)
def test_numbers_that_are_not_finite_are_refused(number: str, said: str) -> None:
    """NaN passes every comparison in a section's own checks, so it must stop here."""
    message = only_problem(f"[outer]\nfolder = 'x'\ninner.lr = {number}")
    assert message == f"outer.inner.lr: expected a finite number, found {said}"


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[outer]\nfolder='x'\nsise = 3", "outer.sise: unknown key; did you mean outer.size?"),
        ("[outer]\nfolder='x'\nlr = 3", "outer.lr: unknown key; did you mean outer.inner.lr"),
        ("[outer]\nfolder='x'\n[outter]", "outter: unknown section; did you mean outer?"),
        ("[outer]\nfolder='x'\nzzzzzz = 3", "outer.zzzzzz: unknown key; known here: folder, size"),
        ("lr = 3\n[outer]\nfolder='x'", "lr: unknown section; did you mean outer.inner.lr"),
    ],
)
def test_unknown_key_names_the_one_that_was_meant(toml: str, message: str) -> None:
    assert only_problem(toml).startswith(message)


def test_missing_required_key_is_named_even_where_its_section_is_missing() -> None:
    assert only_problem("") == "outer.folder: required, but missing"


def test_all_problems_are_reported_at_once() -> None:
    found = problems(
        "[outer]\nsize = 'x'\nflg = true\n[outer.inner]\nlr = -1\n[extra]\nlr = []\n[other]\n"
    )
    assert [line.split(":")[0].split(" =")[0] for line in found] == [
        "other",
        "outer.flg",
        "outer.folder",
        "outer.size",
        "outer.inner.lr",
        "extra.lr",
    ]


def test_int_is_taken_for_float_and_becomes_one() -> None:
    lr = build(Root, {"outer": {"folder": "x", "inner": {"lr": 1}}}).outer.inner.lr
    assert type(lr) is float and lr == 1.0


def test_literal_does_not_take_a_value_that_only_compares_equal() -> None:
    @dataclass(frozen=True)
    class Choice:
        number: Literal[1, 2] = 1

    with pytest.raises(ConfigError, match="expected one of 1, 2, found bool true"):
        build(Choice, {"number": True})


@pytest.mark.parametrize(
    ("text", "parsed", "folder"), [("7", 7, "7"), ("1e3", 1e3, "1e3"), ("a b", "a b", "a b")]
)
def test_override_for_a_text_field_keeps_its_text(text: str, parsed: object, folder: str) -> None:
    """A folder called 7 must not be refused because 7 is also a number."""
    config = build(Root, {"outer": {"folder": OverrideValue(text, parsed)}})
    assert config.outer.folder == Path(folder)


def test_override_with_wrong_type_is_reported_as_its_value_not_its_text() -> None:
    with pytest.raises(ConfigError, match=r"outer\.size: expected int, found float 1\.5"):
        build(Root, {"outer": {"folder": "x", "size": OverrideValue("1.5", 1.5)}})


def test_empty_path_is_refused() -> None:
    """An empty path means the current directory: a run would spill its files there."""
    assert "found an empty string" in only_problem("[outer]\nfolder = ''")


NASTY = 'a "quote" \\ back\nline\ttab \x00\x7f é 漢 # = [x]'


def test_toml_and_dict_round_trip_keeps_every_value() -> None:
    config = Root(
        outer=Outer(
            folder=Path("runs/a b"),
            size=-(2**40),
            flag=True,
            limit=None,
            resume=3,
            inner=Inner(lr=1.2345678901234567e-300, bounds=(-0.0, 1e22), names=(NASTY, "", "none")),
        ),
        extra=None,
    )
    assert build(Root, to_dict(config)) == config
    assert build(Root, tomllib.loads(to_toml(config))) == config
    assert to_dict(config)["outer"]["limit"] is None


def test_known_keys_lists_nested_and_optional_sections() -> None:
    keys = known_keys(Root)
    assert "outer.inner.lr" in keys and "extra.lr" in keys and keys[0] == "outer"
