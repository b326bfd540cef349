"""Messages of a dry run about data, before any process starts."""

import json
from collections.abc import Sequence

import pytest

from megadapo.cli import main
from tests.support import REPOSITORY

GOOD = {"question": "12+34+56=?", "answer": "102"}
QUICKSTART = str(REPOSITORY / "configs" / "quickstart.toml")


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """Return the exit code and stderr of a dry run on lines of a file."""
    monkeypatch.chdir(REPOSITORY)
    source = tmp_path / "rows.jsonl"

    def run(
        *lines: str,
        functions: Sequence[str] = ("rule",),
        overrides: Sequence[str] = (),
        **columns: str,
    ) -> tuple[int, str]:
        source.write_text("".join(f"{line}\n" for line in lines))
        keys = [f"--data.columns.{name}={json.dumps(text)}" for name, text in columns.items()]
        folder = f"--run.folder={tmp_path / 'run'}"
        keys += [f"--data.train={source}", folder, f"--reward.functions={json.dumps(functions)}"]
        code = main(["train", QUICKSTART, "--dry-run", *keys, *overrides])
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("lines", "columns", "said"),
    [
        (
            [json.dumps({"text": "1+1", "answer": "2"})],
            {},
            "line 1: looked for prompt, question, problem or messages, but there are text, answer; "
            "name it with data.columns.prompt",
        ),
        (
            [json.dumps(GOOD)],
            {"ground_truth": "gold"},
            "line 1: looked for column gold, but there are question, answer; correct the name",
        ),
        ([], {}, "rows.jsonl holds no rows"),
        ([json.dumps(GOOD), '{"question": "1'], {}, "line 2: not JSON: "),
        (
            [json.dumps(GOOD)],
            {"ground_truth_pattern": "#### (.+)"},
            "line 1: no line of answer matches data.columns.ground_truth_pattern = '#### (.+)': "
            "'102'",
        ),
    ],
)
def test_wrong_file_is_one_clear_message(dry_run, lines, columns, said):
    code, message = dry_run(*lines, **columns)
    assert code == 3 and said in message and "data.train" in message
    assert "Traceback" not in message


def test_gold_list_is_json_for_own_functions_alone(dry_run, tmp_path, monkeypatch):
    """The message names the way out."""
    row = json.dumps(GOOD | {"answer": {"x": [1, True]}})
    assert "a function of your own in reward.functions" in dry_run(row)[1]
    parameters = "messages, response, tokens, ground_truth, extra_info"
    (tmp_path / "graded.py").write_text(f"def score({parameters}):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    code, message = dry_run(row, functions=["graded:score"])
    assert code == 0 and """column answer: '{"x": [1, true]}'""" in message, message


def test_first_prompt_is_shown_as_the_model_reads_it(dry_run):
    code, message = dry_run(json.dumps(GOOD), template="{prompt}!", data_source="question")
    assert code == 0
    for said in (
        "rows.jsonl, line 1: the prompt is column question",
        "the gold answer is column answer: '102'",
        "the prompt has 11 tokens, without a chat template:",
        "12+34+56=?!",
        "token ids: 17 18 11 19",
        "a response ends at <|endoftext|> (0)",
    ):
        assert said in message


@pytest.mark.parametrize(
    ("keys", "code", "said"),
    [
        (["data.max_prompt_tokens=4"], 3, "has 10 tokens; at most data.max_prompt_tokens = 4"),
        (["data.max_prompt_tokens=4", "data.overlong_prompts=drop"], 0, "the prompt has 10 tokens"),
        (["model.path=~/base"], 0, "the prompt has 10 tokens"),
        (["model.path=~/none"], 3, "/none': there is no such folder"),
    ],
)
def test_model_and_first_prompt_are_checked(dry_run, tmp_path, monkeypatch, keys, code, said):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base").symlink_to(REPOSITORY / "configs" / "quickstart-base")
    found, message = dry_run(json.dumps(GOOD), overrides=[f"--{key}" for key in keys])
    assert (found, message.count(said)) == (code, 1)
