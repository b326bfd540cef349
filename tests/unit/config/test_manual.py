"""The page, schema and tables of keys say what the program accepts."""

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from megadapo.cli import main
from megadapo.config.manual import json_schema, markdown, tables
from megadapo.config.problems import known_keys
from megadapo.config.run_config import RunConfig
from megadapo.errors import ConfigError

REPOSITORY = Path(__file__).parents[3]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.toml"))


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
    shown = {f"{table.name}.{row.name}" for table in tables() for row in table.rows}
    sections = {table.name for table in tables()}
    assert shown | sections == set(known_keys(RunConfig))


def test_a_section_comes_with_its_subsections() -> None:
    parts = ["trainer", "trainer.optimizer"]
    assert [table.name for table in tables("trainer")] == parts
    assert [table.name for table in tables("algorithm.objective")] == ["algorithm.objective"]
    rows = {row.name: row for row in tables("algorithm.objective")[0].rows}
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
