"""Rows add up as written, invalid files are refused, and overrides survive the command line."""

import tomllib

import pytest

from megadapo.config import load_config
from megadapo.config.recipe import parse_override
from megadapo.errors import ConfigError
from megadapo.lab.ablation.rows import RowsFile, arguments, flat, read_rows

ROWS = """
cumulative = {cumulative}
overrides = {{ run.num_steps = 6, sampling.selection = "all" }}
[[row]]
name = "a"
overrides.algorithm.objective.clip_high = 0.2
[[row]]
name = "b"
overrides.algorithm = {{ objective.clip_high = 0.3, overlong_buffer = 0 }}
[[row]]
name = "c"
overrides.sampling.selection = "signal"
"""


def rows_of(text: str) -> RowsFile:
    return RowsFile.model_validate(tomllib.loads(text))


def test_only_cumulative_rows_add_up():
    added, alone = (rows_of(ROWS.format(cumulative=word)) for word in ("true", "false"))
    assert flat(added.overrides_of(2)) == {
        "run.num_steps": 6,
        "sampling.selection": "signal",
        "algorithm.objective.clip_high": 0.3,
        "algorithm.overlong_buffer": 0,
    }
    assert flat(alone.overrides_of(2)) == {"run.num_steps": 6, "sampling.selection": "signal"}
    assert added.comparisons == [("b", "a"), ("c", "b")]
    assert alone.comparisons == [("b", "a"), ("c", "a")]


def test_overrides_mean_the_same_on_the_command_line():
    table = {"a": {"b": {"text": "7", "quoted": 'a"b\\ = c', "none": "none"}, "n": 3e-5}}
    table["a"] |= {"list": ["x", "true"], "flag": False}
    parsed = {".".join(keys): value for keys, value, _ in map(parse_override, arguments(table))}
    assert parsed == flat(table)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "row"),
        ("row = []", "row"),
        ('[[row]]\nname = "x"\nsauce = "y"', "sauce"),
        ('[[row]]\nname = "A b"\n[[row]]\nname = "a  b"', "rename"),
        ('[[row]]\nname = "+"', "letter"),
        ('[[row]]\nname = "x"\noverrides.run.seed = 3', "run.seed"),
        ('cumulative = true\n[[row]]\nname = "x"\nconfig = "y.toml"', "cumulative"),
        ('[[row]]\nname = "x"\nexpects = [{measure = "joy", change = "higher"}]', "joy"),
        ('[[row]]\nname = "x"\nexpects = [{measure = "entropy", change = "up"}]', "change"),
        ("[[row", "not valid TOML"),
    ],
)
def test_invalid_file_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "rows.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_rows(path)
    assert str(path) in str(error.value)


def test_overrides_win_over_extended_recipes(tmp_path):
    (tmp_path / "base.toml").write_text(
        '[run]\nfolder = "r"\nnum_steps = 40\n[model]\npath = "m"\n[data]\ntrain = "d"\n'
    )
    (tmp_path / "deep").mkdir()
    over = tmp_path / "deep" / "over.toml"
    over.write_text('extends = "../base.toml"\n[algorithm.objective]\nclip_high = 0.5\n')
    words = arguments({"algorithm": {"objective": {"clip_low": 0.1}}})
    objective = load_config(over, words).algorithm.objective
    assert (objective.clip_low, objective.clip_high) == (0.1, 0.5)
