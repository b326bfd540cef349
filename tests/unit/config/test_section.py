"""Sections and their manual: each wrong key, type or value is refused and named."""

import json
import pickle
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import jsonschema
import pytest
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from megadapo.cli import main
from megadapo.config import to_dict, to_toml
from megadapo.config.manual import json_schema, markdown, tables
from megadapo.config.problems import describe, known_keys
from megadapo.config.run_config import RunConfig
from megadapo.errors import ConfigError
from megadapo.section import COLLECT, Section, Timeout

NASTY = 'a "quote" \\ back\nline\ttab \x00\x7f é 漢 # = [x]'
REPOSITORY = Path(__file__).parents[3]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.toml"))


class Inner(Section, title="outer.inner"):
    lr: float = 1e-6
    bounds: tuple[float, float] = (0.2, 0.28)
    names: tuple[str, ...] = ()

    def conflicts(self) -> Iterator[str]:
        if self.lr < 0:
            yield f"outer.inner.lr = {self.lr} is negative"
        if self.bounds[0] > self.bounds[1]:
            yield "outer.inner.bounds are the wrong way round"


class Outer(Section, title="outer"):
    folder: Annotated[Path, Field(strict=False)]
    """Path of the folder."""
    size: int = 1
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    limit: float | None = 3.0
    resume: Literal["auto"] | int = "auto"
    kept: Literal["all"] | NonNegativeInt = 3
    num_steps: PositiveInt = 1
    share: Annotated[float, Field(gt=0.0, lt=0.5)] | None = None
    timeout_s: Timeout = 9.0
    inner: Inner = Inner()


class Root(Section, title="root"):
    outer: Outer
    extra: Inner | None = None


def test_changed_fields_are_those_that_are_not_the_default() -> None:
    outer = Outer(folder=Path("x"), size=2, limit=None, share=None, inner=Inner(lr=1e-5))
    assert outer.changed() == ["folder", "size", "limit", "inner"]
    assert outer.changed("share", "limit", "size") == ["limit", "size"]
    assert outer.inner.changed("bounds") == []


def build(table: dict) -> Root:
    return Root.model_validate(table, context=COLLECT)


def problems(toml: str) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        build(tomllib.loads(toml))
    return describe(caught.value, Root)


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
        ("kind = 'c'", 'outer.kind: expected "a" or "b", found str "c"'),
        ("kind = ['a']", 'outer.kind: expected "a" or "b", found a list'),
        ("limit = 'x'", 'outer.limit: expected float or "none", found str "x"'),
        ("limit = false", 'outer.limit: expected float or "none", found bool false'),
        ("resume = 1.5", 'outer.resume: expected "auto" or int, found float 1.5'),
        ("kept = -1", 'outer.kept: expected "all" or at least 0, found int -1'),
        ("num_steps = 0", "outer.num_steps = 0 must be above 0"),
        ("share = 0.5", "outer.share = 0.5 must be below 0.5"),
        ("timeout_s = 0.99", "outer.timeout_s = 0.99 must be at least 1"),
        ("folder = 3", "outer.folder: expected a path, found int 3"),
        ("inner = 3", "outer.inner: expected a table, found int 3"),
        ("inner = []", "outer.inner: expected a table, found a list"),
        ("inner.lr = '1e-6'", 'outer.inner.lr: expected float, found str "1e-6"'),
        ("inner.lr = true", "outer.inner.lr: expected float, found bool true"),
        # NaN passes every comparison in a section's own checks, so it must stop before them
        ("inner.lr = nan", "outer.inner.lr: expected a finite number, found float nan"),
        ("inner.lr = inf", "outer.inner.lr: expected a finite number, found float inf"),
        ("inner.lr = -inf", "outer.inner.lr: expected a finite number, found float -inf"),
        ("inner.lr = -1", "outer.inner.lr = -1.0 is negative"),
        (
            "inner.bounds = [0.2, true]",
            "outer.inner.bounds: entry 1: expected float, found bool true",
        ),
        ("inner.bounds = 0.2", "outer.inner.bounds: expected a list, found float 0.2"),
        ("inner.names = ['a', 3]", "outer.inner.names: entry 1: expected str, found int 3"),
    ],
)
def test_wrong_value_is_named_with_what_was_expected_and_found(line: str, message: str) -> None:
    folder = "" if line.startswith("folder") else "folder = 'x'\n"
    assert only_problem(f"[outer]\n{folder}{line}") == message


def test_an_integer_beyond_all_floats_is_refused() -> None:
    message = only_problem("[outer]\nfolder = 'x'\ninner.lr = 1" + "0" * 400)
    assert message.startswith("outer.inner.lr: expected float, found int 1000")
    assert len(message) < 120


def test_a_list_of_the_wrong_length_is_named() -> None:
    message = only_problem("[outer]\nfolder = 'x'\ninner.bounds = [0.2]")
    assert message.startswith("outer.inner.bounds: ")


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[outer]\nfolder='x'\nsise = 3", "outer.sise: unknown key; did you mean outer.size?"),
        ("[outer]\nfolder='x'\nlr = 3", "outer.lr: unknown key; did you mean outer.inner.lr"),
        ("[outer]\nfolder='x'\n[outter]", "outter: unknown section; did you mean outer?"),
        ("[outer]\nfolder='x'\nzzzzzz = 3", "outer.zzzzzz: unknown key; known here: folder, size"),
        ("[outer]\nfolder='x'\nbands = 3", "outer.bands: unknown key; known here: folder, size"),
        ("lr = 3\n[outer]\nfolder='x'", "lr: unknown section; did you mean outer.inner.lr"),
        ("[outer]\nfolder='x'\nnum_stps = 3", "outer.num_stps: unknown key; did you mean"),
        ("[outer]\nfolder='x'\n[outer.iner]", "outer.iner: unknown key; did you mean outer.inner"),
    ],
)
def test_unknown_key_names_the_one_that_was_meant(toml: str, message: str) -> None:
    assert only_problem(toml).startswith(message)


def test_all_problems_are_reported_at_once() -> None:
    found = problems(
        "[outer]\nsize = 'x'\nflg = true\n[outer.inner]\nlr = -1\nbounds = [2, 1]\n"
        "[extra]\nlr = []\n[other]\n"
    )
    assert [line.split(":")[0].split(" =")[0] for line in found] == [
        "outer.folder",
        "outer.size",
        "outer.inner.lr",
        "outer.inner.bounds are the wrong way round",
        "outer.flg",
        "extra.lr",
        "other",
    ]


def test_int_is_taken_for_float_and_becomes_one() -> None:
    lr = build({"outer": {"folder": "x", "inner": {"lr": 1}}}).outer.inner.lr
    assert type(lr) is float and lr == 1.0


def test_a_section_made_in_code_is_refused_with_its_dotted_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        Outer(folder=Path("x"), size=1.5, timeout_s=0.5)  # type: ignore[arg-type]
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "outer.size",
        "outer.timeout_s",
    ]
    with pytest.raises(ConfigError, match=r"^outer.inner.lr = -1.0 is negative\n.*wrong way"):
        Inner(lr=-1, bounds=(2, 1))
    with pytest.raises(TypeError, match="positional"):
        Inner(1e-6)  # type: ignore[call-arg]


def test_a_section_is_a_plain_value() -> None:
    """Sections are dictionary keys, are sent to other processes, and cannot be changed."""
    outer = Outer(folder=Path("x"), limit=None)
    assert pickle.loads(pickle.dumps(outer)) == outer
    assert {outer: 1}[Outer(folder=Path("x"), limit=None, size=1)] == 1
    with pytest.raises(ValidationError, match="frozen"):
        outer.size = 3  # type: ignore[misc]


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
    assert build(to_dict(config)) == config
    assert build(tomllib.loads(to_toml(config))) == config
    assert to_dict(config)["outer"]["limit"] is None


def test_known_keys_lists_nested_and_optional_sections() -> None:
    keys = list(known_keys(Root))
    assert "outer.inner.lr" in keys and "extra.lr" in keys and keys[0] == "outer"


def test_the_committed_page_is_current() -> None:
    """megadapo config --markdown > docs/configuration.md"""
    page = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == markdown()


def test_the_committed_schema_is_current() -> None:
    """megadapo config --schema > configs/schema.json"""
    committed = (REPOSITORY / "configs" / "schema.json").read_text(encoding="utf-8")
    assert json.loads(committed) == json_schema()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_recipe_names_the_schema_and_fits_it(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("#:schema ./schema.json\n")
    jsonschema.validate(tomllib.loads(path.read_text(encoding="utf-8")), json_schema())


@pytest.mark.parametrize(
    "toml",
    [
        "[run]\nsed = 1",
        "[dapo]",
        "[run]\nnum_steps = 0",
        "[data]\noverlong_prompts = 'keep'",
        "[algorithm]\nmax_kl = 'nan'",
        "[trainer.optimizer]\nlr = '1e-6'",
    ],
)
def test_the_schema_refuses_what_the_program_refuses(toml: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tomllib.loads(toml), json_schema())


def test_the_schema_takes_none_where_a_field_may_be_none() -> None:
    table = tomllib.loads("[algorithm]\nmax_kl = 'none'\n[cluster]\naddress = 'none'")
    jsonschema.validate(table, json_schema())


def test_the_tables_have_every_key() -> None:
    shown = {f"{name}.{row.name}" for name, _, rows in tables() for row in rows}
    assert shown | {name for name, _, _ in tables()} == set(known_keys(RunConfig))


def test_a_section_comes_with_its_subsections() -> None:
    assert [name for name, _, _ in tables("trainer")] == ["trainer", "trainer.optimizer"]
    [(name, _, listed)] = tables("algorithm.objective")
    assert name == "algorithm.objective"
    rows = {row.name: row for row in listed}
    assert (rows["dual_clip"].type, rows["dual_clip"].default) == ('float > 1 | "none"', '"none"')


def test_an_unknown_section_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="trainer.optimiser: .* did you mean trainer.optimizer"):
        tables("trainer.optimiser")


def test_the_command_prints_names_types_defaults_and_texts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["config", "trainer"]) == 0
    printed = capsys.readouterr().out
    assert "[trainer.optimizer]" in printed and "Learning rate after warm-up." in printed
    line = next(line for line in printed.splitlines() if "warmup_steps" in line)
    assert "int >= 0" in line and "20" in line
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    assert main(["config", "--markdown"]) == 0
    assert capsys.readouterr().out == markdown()


def test_help_of_train_says_where_the_keys_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "megadapo config" in " ".join(capsys.readouterr().out.split())
