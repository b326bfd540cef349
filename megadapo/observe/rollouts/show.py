"""The terminal view of saved groups.

Control characters in model output are printed as escapes, so that they cannot move the cursor,
clear the screen or change the direction of text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from megadapo.data.group import CUT_MESSAGES, encode_versions
from megadapo.observe.rollouts.files import HELD_OUT_FOLDER, ROLLOUTS_FOLDER
from megadapo.observe.rollouts.saved_group import (
    Disposition,
    Part,
    SavedGroup,
    SavedResponse,
    conversation,
    environment_of,
)
from megadapo.observe.run_records import RunRecords
from megadapo.observe.tables import count, printable

INDENT = 4


@dataclass(frozen=True, kw_only=True)
class Filter:
    """The groups and responses to show; None shows all."""

    disposition: Disposition | None = None
    prompt: str | None = None
    """Prefix of the prompt's id."""
    correct: bool | None = None
    truncated: bool = False
    """Whether to show only responses cut at the length limit."""
    disagreed: bool = False
    """Whether to show only responses on which rule and symbolic comparison differ."""

    def responses(self, group: SavedGroup) -> list[tuple[int, SavedResponse]]:
        """Return the responses of a group to show, each with its number."""
        if self.disposition not in (None, group.disposition):
            return []
        if self.prompt is not None and not group.prompt.id.startswith(self.prompt):
            return []
        return [
            (number, saved)
            for number, saved in enumerate(group.responses, start=1)
            if self.correct in (None, saved.score.correct)
            and (saved.response.truncated or not self.truncated)
            and (saved.disagreed or not self.disagreed)
        ]


def show_step(
    run_folder: Path,
    step: int | None,
    wanted: Filter,
    *,
    held_out: bool = False,
    limit: int,
    console: Console,
) -> None:
    """Print the wanted groups of a step, through a pager if the console is a terminal.

    Args:
        step: by default the last step with saved groups.
        held_out: show the evaluation after the step.
        limit: largest number of groups printed.
    """
    run = RunRecords(run_folder)
    folder = HELD_OUT_FOLDER if held_out else ROLLOUTS_FOLDER
    step = run.step_with_groups(step, folder)
    pager: AbstractContextManager[object] = nullcontext()
    if console.is_terminal:
        pager = console.pager(styles=True)
    with pager:
        for line in _render_step(step, run.groups(step, folder), wanted, limit):
            console.print(line)


def _render_step(
    step: int, groups: Iterable[SavedGroup], wanted: Filter, limit: int
) -> Iterator[RenderableType]:
    num_groups = num_shown = num_found = 0
    for group in groups:
        num_groups += 1
        responses = wanted.responses(group)
        num_found += bool(responses)
        if responses and num_shown < limit:
            num_shown += 1
            yield _render_group(group, responses)
    left = f"; a higher --limit shows {num_found - num_shown} more" if num_found > num_shown else ""
    summary = f"step {step}: {num_shown} of {num_groups} saved groups{left}"
    yield Rule(Text(summary, "bold"), style="dim")


def _render_group(
    group: SavedGroup, responses: Sequence[tuple[int, SavedResponse]]
) -> RenderableType:
    correct, rewards = group.group.correct, group.group.rewards
    found = f"rewards from {min(rewards):g} to {max(rewards):g}" if rewards else "no rewards"
    if correct is not None:
        found = f"{sum(correct)} of {len(correct)} correct"
    title = f"group {group.prompt_index}: {group.disposition}, {found}"
    if group.from_reserve:
        title += ", from the reserve"
    parts: list[RenderableType] = [Rule(Text(title, "bold cyan"), style="cyan")]
    parts.append(Text(printable(f"prompt {group.prompt.id}, of {group.prompt.data_source}"), "dim"))
    for role, content in group.prompt.messages:
        parts.append(Text(printable(role), "bold"))
        parts.append(_indented(content))
    parts.append(Text.assemble("correct answer: ", (printable(group.prompt.ground_truth), "bold")))
    for number, saved in responses:
        parts += ["", _header(number, saved)]
        if saved.score.parts:
            scores = ", ".join(f"{printable(name)} {value:g}" for name, value in saved.score.parts)
            steps = "; steps " + " ".join(f"{value:g}" for _, value in saved.score.steps)
            parts.append(Text(f"reward from {scores}{steps * bool(saved.score.steps)}", "dim"))
        for name, text in saved.score.texts:
            parts.append(Text(printable(f"{name}: {text}"), "dim"))
        if saved.disagreed:
            verdicts = {True: "correct", False: "wrong", None: "nothing"}
            text = (
                f"the scorers differ: the rule says {verdicts[saved.rule_correct]}, "
                f"the symbolic comparison {verdicts[saved.score.symbolic_correct]}"
            )
            parts.append(Text(text, "bold magenta"))
        if saved.response.turns:
            parts += _conversation(saved, group.control_tokens)
        else:
            parts.append(_indented(saved.response.text))
    return Group(*parts, "")


def _conversation(
    saved: SavedResponse, control_tokens: Mapping[int, str]
) -> Iterator[RenderableType]:
    """Yield the turns of a response, each with its tokens, and what answered it."""
    environment, number = environment_of(saved), 0
    for part in conversation(saved.response):
        number += part.turn is None
        size = count(part.end - part.start, "token")
        if part.turn is None:
            head = Text(f"  turn {number}: {size}", "bold")
        elif environment is None:
            head = Text(f"  tool: {size}", "cyan")
        else:
            cost = f"reward {part.turn.reward:+g}, {part.turn.seconds:.3g} s"
            if num_cut := dict(part.turn.metrics).get(CUT_MESSAGES):
                cost += f", {num_cut:g} cut off"
            head = Text(f"  {printable(environment)}: {size}, {cost}", "cyan")
        yield head
        if part.start < part.end:
            text = _text_of(saved, part, control_tokens)
            yield Padding(text, (0, 0, 0, INDENT), expand=False)


def _text_of(saved: SavedResponse, part: Part, control_tokens: Mapping[int, str]) -> Text:
    """Return the text of a part, with the names of control tokens dimmed."""
    text = Text(style="" if part.turn is None else "cyan")
    place = slice(part.start, part.end)
    ids = saved.response.token_ids[place].tolist()
    for number, piece in zip(ids, saved.tokens[place], strict=True):
        if number in control_tokens and not piece:
            text.append(printable(control_tokens[number]), "dim")
        else:
            text.append(printable(piece))
    # templates write line breaks around messages
    plain = text.plain
    first = len(plain) - len(plain.lstrip("\n"))
    return text[first : max(first, len(plain.rstrip("\n")))]


def _header(number: int, saved: SavedResponse) -> Text:
    response, score = saved.response, saved.score
    colour, verdict = {
        True: ("green", "correct"),
        False: ("red", "wrong"),
        None: ("cyan", "scored"),
    }[score.correct]
    text = Text.assemble(
        (f"response {number}: ", "bold"),
        (verdict, f"bold {colour}"),
        ", answer ",
        (printable(score.answer) or "-", colour),
        f", reward {score.reward:+g}",
    )
    if saved.penalty:
        text.append(f", overlong {saved.penalty:+.4g}", "yellow")
    if saved.advantage is not None:
        text.append(f", advantage {saved.advantage:+.4f}")
    text.append(f", {len(response.token_ids)} tokens, ")
    text.append(printable(response.finish_reason), "bold yellow" if response.truncated else "")
    sampled = response.policy_versions[response.is_sampled]
    versions = " then ".join(str(version) for version, _ in encode_versions(sampled))
    text.append(f", policy_version {versions or '-'}", "dim")
    if num_output := len(response.token_ids) - len(sampled):
        author = "tool output" if environment_of(saved) is None else "the environment"
        text.append(f", {num_output} tokens of {author}", "dim")
    return text


def _indented(text: str) -> Padding:
    return Padding(Text(printable(text)), (0, 0, 0, INDENT), expand=False)
