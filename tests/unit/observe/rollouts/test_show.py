"""`megadapo show`: output that controls the terminal, wrong filters, and unhelpful errors."""

import io
import pydoc
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from megadapo.cli import run_command
from megadapo.commands.show import DISPOSITIONS
from megadapo.errors import ConfigError, DataError
from megadapo.observe.rollouts.files import rollouts_path, write_rollouts
from megadapo.observe.rollouts.saved_group import Disposition, SavedGroup
from megadapo.observe.rollouts.show import Filter, show_step
from megadapo.observe.tables import printable
from tests.support.rollout.saved_groups import awkward_group, saved_group, saved_response, untrained

CORRECT = saved_response("all correct")
WRONG = saved_response("all wrong", correct=False, reward=-1.0, symbolic_correct=False)
CUT = saved_response("cut off", correct=False, finish_reason="length", symbolic_correct=None)
DIFFERING = saved_response("as text only", correct=False, answer="0.5", symbolic_correct=True)


def save(folder: Path, step: int, *groups: SavedGroup) -> Path:
    write_rollouts(rollouts_path(folder, step), groups)
    return folder


def shown(
    folder: Path, step: int | None = None, *, limit: int = 20, terminal: bool = False, **wanted
) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal, highlight=False)
    show_step(folder, step, Filter(**wanted), limit=limit, console=console)
    return console.file.getvalue()


def test_group_is_shown_with_all_facts(tmp_path):
    text = shown(save(tmp_path, 4, saved_group(CORRECT, WRONG, CUT, DIFFERING)))
    for part in (
        "group 7: trained, 1 of 4 correct",
        "1+1=?",
        "correct answer: 2",
        "response 1: correct, answer 2, reward +1, overlong -0.3333, advantage +0.3000, 11 tokens, "
        "stop, policy_version 3",
        "response 2: wrong",
        "7 tokens, length",
        "the rule says wrong, the symbolic comparison correct",
        "step 4: 1 of 1 saved groups",
    ):
        assert part in " ".join(text.split()), part
    assert text.count("scorers differ") == 1


@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        ({}, {"all correct", "all wrong", "cut off", "as text only"}),
        ({"correct": True}, {"all correct"}),
        ({"correct": False}, {"all wrong", "cut off", "as text only"}),
        ({"truncated": True}, {"cut off"}),
        ({"disagreed": True}, {"as text only"}),
        ({"disagreed": True, "truncated": True}, set()),
        ({"prompt": "id-7"}, {"all correct", "all wrong", "cut off", "as text only"}),
        ({"prompt": "d-7"}, set()),
        ({"disposition": "all_wrong"}, set()),
    ],
)
def test_filters(tmp_path, wanted, texts):
    text = shown(save(tmp_path, 1, saved_group(CORRECT, WRONG, CUT, DIFFERING)), **wanted)
    every = ("all correct", "all wrong", "cut off", "as text only")
    assert {part for part in every if f"    {part}" in text} == texts
    assert f"{int(bool(texts))} of 1 saved groups" in text


def test_groups_are_filtered_by_disposition(tmp_path):
    groups = [
        saved_group(CORRECT, prompt_index=i, disposition=disposition)
        for i, disposition in enumerate(get_args(Disposition))
    ]
    save(tmp_path, 1, *groups)
    for index, disposition in enumerate(DISPOSITIONS):
        text = shown(tmp_path, disposition=disposition)
        assert f"group {index}: {disposition}" in text and text.count("group ") == 1
    assert get_args(Disposition) == DISPOSITIONS


def test_limit_shows_the_number_of_hidden_groups(tmp_path):
    save(tmp_path, 1, *(saved_group(CORRECT, prompt_index=index) for index in range(5)))
    text = shown(tmp_path, limit=2)
    assert "group 1:" in text and "group 2:" not in text
    assert "2 of 5 saved groups; a higher --limit shows 3 more" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_model_output_cannot_control_the_terminal(tmp_path, terminal, monkeypatch):
    hostile = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202eevil\u2066\x00\b\x7f[bold red]markup[/]"
    own = untrained(hostile, answer=hostile, parts=((hostile, 1.0),))
    save(tmp_path, 1, saved_group(own, awkward_group().responses[2]))
    pages: list[str] = []
    monkeypatch.setattr(pydoc, "pager", pages.append)
    text = shown(tmp_path, terminal=terminal) + "".join(pages)
    assert len(pages) == terminal
    for character in "\x07\x9b\r\u202e\u2066\x00\b\x7f\ud800":
        assert character not in text, ascii(character)
    assert "\x1b[2J" not in text and "\x1b]0" not in text
    assert r"\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202eevil" in text
    assert "[bold red]markup[/]" in text, "read as markup"


def test_reward_parts_and_steps_are_shown(tmp_path):
    parts = (("arithmetic_steps", 0.0), ("arithmetic_steps/steps", 2.0))
    scored = saved_response("ab", parts=parts, steps=((1, 1.0), (2, 0.25)))
    save(tmp_path, 1, saved_group(scored, saved_response("c")))
    text = shown(tmp_path)
    assert "reward from arithmetic_steps 0, arithmetic_steps/steps 2; steps 1 0.25" in text
    assert text.count("reward from") == 1


def test_printable_text_is_unchanged():
    for text in ("", "1 + 1 = 2\n\tso: \u4e8c \u00e9 \U0001f600", "\\x1b", "a\\n"):
        assert printable(text) == text
    assert printable("\u2028\ufeff\ud800") == r"\u2028\ufeff\ud800"


def test_last_saved_step_is_the_default(tmp_path):
    for step in (2, 10, 9):
        save(tmp_path, step, saved_group(step=step))
    assert "step 10:" in shown(tmp_path)
    assert "step 9:" in shown(tmp_path, 9)


def test_missing_step_error_lists_saved_steps(tmp_path):
    with pytest.raises(DataError, match=r"no saved responses \(.*observe\.saved_groups"):
        shown(tmp_path)
    for step in (1, 2, 3, 6, 8, 9):
        save(tmp_path, step, saved_group())
    with pytest.raises(DataError, match=r"of step 4, only of steps 1-3, 6, 8-9$"):
        shown(tmp_path, 4)


def test_command_options(tmp_path, capsys):
    save(tmp_path, 3, saved_group(CORRECT, WRONG))
    assert run_command(["show", str(tmp_path), "3", "--wrong", "--limit", "1"]) == 0
    output = capsys.readouterr().out
    assert "all wrong" in output and "all correct" not in output
    with pytest.raises(SystemExit):
        run_command(["show", str(tmp_path), "--wrong", "--correct"])
    with pytest.raises(ConfigError):
        run_command(["show", str(tmp_path), "3", "--wrongs"])
