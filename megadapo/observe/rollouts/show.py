"""Saved groups as a person reads them in a terminal.

What a model wrote is shown and never obeyed: characters that could move the cursor, clear the
screen or turn the direction of text are written as their escapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from megadapo.data.policy_versions import NO_VERSION, encode_versions
from megadapo.errors import DataError
from megadapo.observe.rollouts.files import read_rollouts, rollouts_path, saved_steps
from megadapo.observe.rollouts.saved_group import Disposition, SavedGroup, SavedResponse

INDENT = 4


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which groups are shown, and which of their responses; None asks for all."""

    fate: Disposition | None = None
    prompt: str | None = None
    """Beginning of the prompt's id."""
    correct: bool | None = None
    truncated: bool = False
    """Only responses that were cut at the length limit."""
    disagreed: bool = False
    """Only responses on which rule and symbolic comparison differ."""

    def responses(self, group: SavedGroup) -> list[tuple[int, SavedResponse]]:
        """The responses of a group that are shown, each with its number."""
        if self.fate not in (None, group.fate):
            return []
        if self.prompt is not None and not group.prompt.id.startswith(self.prompt):
            return []
        return [(i, r) for i, r in enumerate(group.responses, start=1) if self._takes(r)]

    def _takes(self, response: SavedResponse) -> bool:
        return (
            self.correct in (None, response.correct)
            and (response.truncated or not self.truncated)
            and (response.disagreed or not self.disagreed)
        )


def show_step(
    run_folder: Path, step: int | None, wanted: Filter, *, limit: int, console: Console
) -> None:
    """Print the wanted groups of a step, through a pager where the console is a terminal.

    Args:
        step: None takes the last one with saved groups.
        limit: most groups printed.

    Raises:
        DataError: nothing is saved of that step, or the file is damaged.
    """
    step = _find_step(run_folder, step)
    lines = _render_step(step, read_rollouts(rollouts_path(run_folder, step)), wanted, limit)
    if not console.is_terminal:
        for line in lines:
            console.print(line)
        return
    with console.pager(styles=True):
        for line in lines:
            console.print(line)


def printable(text: str) -> str:
    """Return text that a terminal shows as it is: all but line breaks and tabs that is not visible,
    or changes what is around it, becomes its escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _find_step(run_folder: Path, step: int | None) -> int:
    steps = saved_steps(run_folder)
    if not steps:
        raise DataError(
            f"{run_folder} has no saved responses (rollouts/step-N.jsonl.zst); "
            "observe.saved_groups says how many groups of a step a run saves"
        )
    if step is not None and step not in steps:
        raise DataError(
            f"{run_folder} has no saved responses of step {step}; it has those of {_ranges(steps)}"
        )
    return steps[-1] if step is None else step


def _ranges(numbers: Sequence[int]) -> str:
    """ "1-3, 7" for 1, 2, 3, 7."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


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
    num_right = sum(response.correct for response in group.responses)
    title = f"group {group.order}: {group.fate}, {num_right} of {len(group.responses)} right"
    if group.from_reserve:
        title += ", from the reserve"
    parts: list[RenderableType] = [Rule(Text(title, "bold cyan"), style="cyan")]
    parts.append(Text(printable(f"prompt {group.prompt.id}, of {group.prompt.data_source}"), "dim"))
    for role, content in group.prompt.messages:
        parts.append(Text(printable(role), "bold"))
        parts.append(_indented(content))
    parts.append(Text.assemble("right answer: ", (printable(group.prompt.ground_truth), "bold")))
    for number, response in responses:
        parts += ["", _header(number, response)]
        if response.reward_parts:
            parts.append(_reward_parts(response))
        if response.disagreed:
            parts.append(_disagreement(response))
        parts.append(_indented(response.text))
    return Group(*parts, "")


def _header(number: int, response: SavedResponse) -> Text:
    colour = "green" if response.correct else "red"
    text = Text.assemble(
        (f"response {number}: ", "bold"),
        ("right" if response.correct else "wrong", f"bold {colour}"),
        ", answer ",
        (printable(response.answer) or "-", colour),
        f", reward {response.reward:+g}",
    )
    if response.penalty:
        text.append(f", overlong {response.penalty:+.4g}", "yellow")
    if response.advantage is not None:
        text.append(f", advantage {response.advantage:+.4f}")
    text.append(f", {len(response.token_ids)} tokens, ")
    text.append(printable(response.finish_reason), "bold yellow" if response.truncated else "")
    text.append(f", policy_version {_versions(response)}", "dim")
    if num_output := int((response.policy_versions == NO_VERSION).sum()):
        text.append(f", {num_output} tokens of a tool", "dim")
    return text


def _reward_parts(response: SavedResponse) -> Text:
    parts = ", ".join(
        f"{printable(name)} {value:g}" for name, value in response.reward_parts.items()
    )
    text = Text(f"reward of {parts}", "dim")
    if response.steps:
        text.append("; steps " + " ".join(f"{score:g}" for _, score in response.steps))
    return text


def _versions(response: SavedResponse) -> str:
    sampled = response.policy_versions[response.policy_versions != NO_VERSION]
    versions = [str(version) for version, _ in encode_versions(sampled)]
    return " then ".join(versions) or "-"


def _indented(text: str) -> Padding:
    return Padding(Text(printable(text)), (0, 0, 0, INDENT), expand=False)


def _disagreement(response: SavedResponse) -> Text:
    verdicts = {True: "right", False: "wrong", None: "nothing"}
    return Text(
        f"the scorers differ: the rule says {verdicts[response.rule_correct]}, "
        f"the symbolic comparison {verdicts[response.symbolic_correct]}",
        "bold magenta",
    )
