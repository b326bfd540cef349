"""`megadapo show`: output that controls the terminal, wrong filters, and unhelpful errors."""

import io
import pydoc
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from megadapo.cli import run_command
from megadapo.commands.show import DISPOSITIONS
from megadapo.data.group import CUT_MESSAGES
from megadapo.errors import ConfigError, DataError
from megadapo.observe.rollouts.files import (
    HELD_OUT_FOLDER,
    rollouts_path,
    step_file,
    write_rollouts,
)
from megadapo.observe.rollouts.saved_group import Disposition, SavedGroup, conversation
from megadapo.observe.rollouts.show import Filter, show_step
from megadapo.observe.tables import printable
from tests.support.rollout.saved_groups import (
    CONTROL,
    CONTROL_MARK,
    awkward_group,
    saved_episode,
    saved_group,
    saved_response,
    untrained,
)

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
    with pytest.raises(DataError, match=r"no saved groups \(.*observe\.saved_groups"):
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
    with pytest.raises(DataError, match="rollouts/held_out/step-N"):
        run_command(["show", str(tmp_path), "--held-out"])
    write_rollouts(step_file(tmp_path / HELD_OUT_FOLDER, 2), [saved_group(WRONG)])
    assert run_command(["show", str(tmp_path), "--held-out"]) == 0
    assert "step 2: 1 of 1 saved groups" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_command(["show", str(tmp_path), "--wrong", "--correct"])
    with pytest.raises(ConfigError):
        run_command(["show", str(tmp_path), "3", "--wrongs"])


GAME = saved_episode(
    (f"is it 3?{CONTROL_MARK}", f"\nuser\nlower{CONTROL_MARK}\nassistant\n", 0.0),
    (f"2{CONTROL_MARK}", "", 1.5),
)
NAMES = {CONTROL: "<|im_end|>"}


def lines_of(text: str) -> list[str]:
    """Return the lines below the header of the only response."""
    lines = [line.rstrip() for line in text.splitlines()]
    first = next(n for n, line in enumerate(lines) if line.startswith("  turn 1"))
    return lines[first : lines.index("", first)]


def test_episode_is_shown_as_a_conversation(tmp_path):
    """Catches tokens of the environment that are shown as the model's, and lost rewards."""
    text = shown(save(tmp_path, 1, saved_group(GAME, control_tokens=NAMES)))
    assert lines_of(text) == [
        "  turn 1: 9 tokens",
        "    is it 3?<|im_end|>",
        "  Game: 23 tokens, reward +0, 0.25 s",
        "    user",
        "    lower<|im_end|>",
        "    assistant",
        "  turn 2: 2 tokens",
        "    2<|im_end|>",
        "  Game: 0 tokens, reward +1.5, 0.25 s",
    ]
    assert "reward from environment/Game/return 1.5" in text
    assert "23 tokens of the environment" in " ".join(text.split())


def test_first_observation_and_last_turn_are_shown(tmp_path):
    """An environment may speak first, and the length may end the model's last turn."""
    episode = saved_episode(("", "begin", 0.0), ("a", "no", -1.0), last="b c")
    text = shown(save(tmp_path, 1, saved_group(episode)))
    assert "  Game: 5 tokens, reward +0, 0.25 s\n    begin\n  turn 1: 1 token\n    a\n" in text
    assert "  Game: 2 tokens, reward -1, 0.25 s\n    no\n  turn 2: 3 tokens\n    b c\n" in text


def test_cut_observations_are_shown(tmp_path):
    """Catches a long observation that the model has read in part only, without a sign of it."""
    episode = saved_episode(("a", "no", 0.0), ("b", "yes", 1.0))
    first, second = episode.response.turns
    cut = (replace(first, metrics=(("calls", 1.0), (CUT_MESSAGES, 2.0))), second)
    episode = replace(episode, response=replace(episode.response, turns=cut))
    text = shown(save(tmp_path, 1, saved_group(episode)))
    assert "  Game: 2 tokens, reward +0, 0.25 s, 2 cut off\n    no\n" in text
    assert text.count("cut off") == 1


def test_output_of_a_tool_is_shown_inside_the_turn(tmp_path):
    episode = saved_episode(("1+1=", "<result>2", 0.0), last="2", environment=None)
    text = shown(save(tmp_path, 1, saved_group(episode)))
    assert lines_of(text) == [
        "  turn 1: 4 tokens",
        "    1+1=",
        "  tool: 9 tokens",
        "    <result>2",
        "  turn 2: 1 token",
        "    2",
    ]
    assert "9 tokens of tool output" in text


def test_response_without_turns_has_no_conversation(tmp_path):
    text = shown(save(tmp_path, 1, saved_group(CORRECT, control_tokens=NAMES)))
    assert "    all correct\n" in text and "turn 1" not in text


def test_control_tokens_are_dim_and_their_names_in_texts_are_not(tmp_path, monkeypatch):
    """Catches a user's text "<|im_end|>" that looks like the end of a turn."""
    episode = saved_episode((f"x{CONTROL_MARK}", "<|im_end|>", 0.0))
    save(tmp_path, 1, saved_group(episode, control_tokens=NAMES))
    pages: list[str] = []
    monkeypatch.setattr(pydoc, "pager", pages.append)
    shown(tmp_path, terminal=True)
    assert "x\x1b[2m<|im_end|>" in pages[0] and "\x1b[36m<|im_end|>" in pages[0]
    assert pages[0].count("\x1b[2m<|im_end|>") == 1


def test_conversation_cannot_control_the_terminal(tmp_path):
    hostile = "\x1b[2J\r\u202e[bold]x[/]"
    episode = saved_episode((hostile + CONTROL_MARK, hostile, 0.0), environment=f"G{hostile}")
    text = shown(save(tmp_path, 1, saved_group(episode, control_tokens={CONTROL: hostile})))
    assert not {"\x1b", "\r", "\u202e"} & set(text)
    assert text.count(r"\x1b[2J\r\u202e[bold]x[/]") >= 4


@pytest.mark.parametrize("num_turns", [0, 1, 7])
@pytest.mark.parametrize("last", ["", "end"])
def test_parts_of_a_conversation_are_the_whole_response(num_turns, last):
    """Catches tokens that no part has, or two parts have, with empty actions and answers."""
    turns = [("a" * (n % 3), "b" * (n % 2), float(n)) for n in range(num_turns)]
    response = saved_episode(*turns, last=last).response
    parts = list(conversation(response))
    places = [index for part in parts for index in range(part.start, part.end)]
    assert places == list(range(len(response.token_ids)))
    answered = [part.turn for part in parts if part.turn is not None]
    assert answered == list(response.turns)
    for part in parts:
        assert (response.is_sampled[part.start : part.end] == (part.turn is None)).all()
