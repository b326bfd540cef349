"""Messages of a dry run about data, before any process starts."""

import json

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

    def run(*lines: str, **columns: str) -> tuple[int, str]:
        source.write_text("".join(f"{line}\n" for line in lines))
        keys = [f"--data.columns.{name}={json.dumps(text)}" for name, text in columns.items()]
        folder = f"--run.folder={tmp_path / 'run'}"
        code = main(["train", QUICKSTART, "--dry-run", f"--data.train={source}", folder, *keys])
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
