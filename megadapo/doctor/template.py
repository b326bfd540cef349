"""`megadapo doctor --template`: the turns, roles and control tokens of a chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jinja2

from megadapo.config import load_config
from megadapo.doctor.doctor import Diagnosis, report
from megadapo.errors import ConfigError, DataError
from megadapo.observe.tables import TextTable, printable
from megadapo.tokens.chat import (
    ASSISTANT,
    Messages,
    answer_ids,
    chat_ids,
    chat_text,
    opened_thought,
)
from megadapo.tokens.encoder import encoder_of
from megadapo.tokens.stops import ends_of_folder, stop_ids, turn_end
from megadapo.tokens.tokenizer import TemplateValue, read_tokenizer
from megadapo.tokens.turns import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megadapo.tokens.encoder import TextEncoder

_QUESTION = ("user", "1")
_NEXT: dict[str, Messages] = {
    "user": (("user", "2"),),
    "tool": (("tool", "2"),),
    "tool, tool": (("tool", "2"), ("tool", "3")),
    "tool, user": (("tool", "2"), ("user", "3")),
}
"""Messages after an answer, by their roles."""
_ANSWERS = {
    "plain text": "a b",
    "with a thought": "<think>\na\n</think>\n\nb",
    "blanks at its ends": " a\n",
}
_FOLLOW_UPS: tuple[Messages, ...] = (_NEXT["user"], _NEXT["tool"], ())
"""Messages after an answer that is rendered again."""
_ARGUMENTS = '{"x":1,"y":"z"}'
"""Arguments of a tool call as models often write them, without blanks."""
_MARK = "NEXT"
_MOST_EXAMPLES = 3
_DIFFERS = "differs"
_OURS = "megadapo"


@dataclass(frozen=True)
class Answer:
    """One kind of answer, and what the template makes of it when it renders the chat again."""

    answer: str
    before_user: str
    before_tool: str
    last: str


@dataclass(frozen=True)
class Glue:
    """The glue of some messages beside the template's rendering of the whole conversation."""

    messages: str
    first: str
    """Result for the first turn of the conversation."""
    later: str
    """Result for a turn after another one with such messages."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Smuggled:
    """Control tokens that a text with their names becomes."""

    way: str
    special: int
    others: int
    examples: tuple[str, ...]


def doctor_template(model: str, *, as_json: bool) -> int:
    """Check a chat template, print the diagnosis and return the exit code.

    Args:
        model: folder or Hub name, or a recipe, which names its model and sets the variables of its
            template.
    """
    if Path(model).is_file():
        config = load_config(model)
        model, variables = config.model.path, config.data.chat_template_kwargs
        diagnosis = diagnose_template(model, variables, key="model.path")
    else:
        diagnosis = diagnose_template(model)
    healthy = "no problem: glue is exact, and no text becomes a control token"
    return report(diagnosis, _tables(**diagnosis.facts), as_json=as_json, healthy=healthy)


def diagnose_template(
    model: str, variables: Mapping[str, TemplateValue] | None = None, *, key: str = "--template"
) -> Diagnosis:
    """Check the chat template of a model's folder or Hub name.

    Args:
        variables: data.chat_template_kwargs.
        key: name of `model` for errors.
    """
    tokenizer = read_tokenizer(model, key=key, chat_template_kwargs=variables)
    warnings = list(_end_warnings(tokenizer))
    facts: dict[str, Any] = {
        "model": model,
        "answers": [],
        "glue": [],
        "smuggled": [],
        "ends": _ends(tokenizer),
    }
    if refusal := _refusal(tokenizer, "user"):
        return Diagnosis(errors=[refusal], warnings=warnings, facts=facts)
    roles = ["user"]
    if refusal := _refusal(tokenizer, "tool"):
        warnings.append(refusal)
    else:
        roles.append("tool")
    checks = _Checks(tokenizer, Turns(tokenizer, roles))
    glue, smuggled = list(checks.glue()), list(checks.smuggled())
    facts |= {"answers": list(checks.answers()), "glue": glue, "smuggled": smuggled}
    errors = [
        f"the glue of ({one.messages}) is not the template's: report this with the template"
        for one in glue
        if one.first == _DIFFERS
    ]
    errors += [
        f"{one.way}: names in a text become {', '.join(one.examples)}: report this"
        for one in smuggled
        if one.way.startswith(_OURS) and one.examples
    ]
    changing = [f"({one.messages})" for one in glue if one.later == _DIFFERS != one.first]
    if changing:
        warnings.append(
            f"the template writes {', '.join(changing)} in another way after an earlier turn of "
            "the kind: megadapo always writes the first way, a server with this template does not"
        )
    return Diagnosis(errors=errors, warnings=warnings, facts=facts)


def _refusal(tokenizer: PreTrainedTokenizerBase, role: str) -> str | None:
    """Return why turns cannot be followed by messages of a role, None if they can."""
    try:
        Turns(tokenizer, (role,))
    except ConfigError as error:
        return str(error)
    return None


class _Checks:
    """Checks of one template that `Turns` accepts, at least for messages of users."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turns: Turns) -> None:
        self._tokenizer, self._turns = tokenizer, turns
        self._encoder = cast("TextEncoder", encoder_of(tokenizer))
        [self._close] = turns.stop_ids
        self._close_name = cast(str, tokenizer.convert_ids_to_tokens(self._close))

    def answers(self) -> Iterator[Answer]:
        for name, text in _ANSWERS.items():
            ids = answer_ids(text, self._tokenizer)
            yield Answer(f"{name}, {text!r}", *self._kept(text, ids))
        text = "and then"
        ids = [token for letter in text for token in answer_ids(letter, self._tokenizer)]
        yield Answer(f"{text!r}, sampled letter by letter", *self._kept(text, ids))
        for content in ("", None):
            name = "null" if content is None else "empty"
            yield Answer(f"tool_calls, content {name}", *self._kept_call(content))

    def glue(self) -> Iterator[Glue]:
        for name, messages in _NEXT.items():
            turn = [(ASSISTANT, "0"), *messages]
            try:
                glue = self._turns.ids_after([], [{"role": r, "content": c} for r, c in messages])
            except DataError:
                yield Glue(name, "refused", "refused", "")
                continue
            first, later = (
                "exact" if chat_ids(chat, self._tokenizer)[-len(glue) :] == glue else _DIFFERS
                for chat in ([_QUESTION, *turn], [_QUESTION, *turn, *turn])
            )
            yield Glue(name, first, later, repr(self._tokenizer.decode(glue)))

    def smuggled(self) -> Iterator[Smuggled]:
        """Yield what a text with the names of all control tokens becomes."""
        names = " ".join(self._encoder.controls)
        yield self._found("the text, encoded", [], self._encoded(names))
        split = self._encoded(names, split_special_tokens=True)
        yield self._found("the same with split_special_tokens", [], split)
        for role in self._turns.roles:
            plain, hostile = (
                self._encoded(
                    chat_text([_QUESTION, (ASSISTANT, "0"), (role, text)], self._tokenizer)
                )
                for text in ("0", names)
            )
            yield self._found(f"apply_chat_template, {role}", plain, hostile)
        for role in self._turns.roles:
            plain, hostile = (
                self._turns.ids_after([], [{"role": role, "content": text}])
                for text in ("0", names)
            )
            yield self._found(f"{_OURS}, {role}", plain, hostile)

    def _kept(self, text: str, sampled: list[int]) -> Iterator[str]:
        """Yield whether an answer's tokens are there when the template renders the chat again."""
        head = chat_text([_QUESTION], self._tokenizer)
        before = [*chat_ids([_QUESTION], self._tokenizer), *sampled, self._close]
        for messages in _FOLLOW_UPS:
            chat = [_QUESTION, (ASSISTANT, text), *messages]
            try:
                # if there are no new messages, the chat ends with the answer
                ids = chat_ids(chat, self._tokenizer, add_generation_prompt=bool(messages))
                shown = chat_text(chat, self._tokenizer, add_generation_prompt=bool(messages))
            except jinja2.TemplateError:
                yield "refused"
                continue
            written = shown.removeprefix(head).partition(self._close_name)[0]
            if ids[: len(before)] == before:
                yield "kept"
            elif not shown.startswith(head):
                yield "begins otherwise"
            else:
                yield "other tokens" if written == text else f"becomes {written!r:.40}"

    def _kept_call(self, content: str | None) -> Iterator[str]:
        """Yield what becomes of a tool call that a server has read and gives to the template."""
        for messages in _FOLLOW_UPS:
            found = "refused"
            # most templates want the arguments as a table, some as text
            for arguments in ({"x": 1, "y": "z"}, _ARGUMENTS):
                call = {"name": "calc", "arguments": arguments}
                calls = [{"type": "function", "id": "call00001", "function": call}]
                chat: list[dict[str, Any]] = [
                    {"role": "user", "content": "1"},
                    {"role": ASSISTANT, "content": content, "tool_calls": calls},
                    *({"role": role, "content": _MARK} for role, _ in messages),
                ]
                try:
                    text = cast(str, self._tokenizer.apply_chat_template(chat, tokenize=False))
                except (jinja2.TemplateError, TypeError):
                    # some templates add texts to the table, or to null
                    continue
                _, name, rest = text.partition("calc")
                if not name:
                    found = "left out"
                    continue
                written = rest.partition(_MARK)[0]
                found = "kept" if _ARGUMENTS in written else "spelled anew"
                if self._close_name not in written:
                    found = "not closed"
                break
            yield found

    def _encoded(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        ids = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=split_special_tokens
        )
        return cast(list[int], ids)

    def _found(self, way: str, plain: Sequence[int], hostile: Sequence[int]) -> Smuggled:
        """Return the control tokens that are in the hostile tokens alone."""
        more = Counter(hostile) - Counter(plain)
        become = [name for name, number in self._encoder.controls.items() if more[number]]
        special = [name for name in become if name in self._encoder.special]
        # the template's own names do the most harm
        template = str(self._tokenizer.chat_template)
        examples = sorted(become, key=lambda name: (name not in template, name in special))
        return Smuggled(
            way=way,
            special=len(special),
            others=len(become) - len(special),
            examples=tuple(examples[:_MOST_EXAMPLES]),
        )


def _ends(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    def named(*numbers: int | None) -> str:
        known = [number for number in numbers if number is not None]
        return ", ".join(f"{tokenizer.convert_ids_to_tokens(one)} ({one})" for one in known)

    ends = {
        "close token of the template": named(turn_end(tokenizer)),
        "end-of-sequence token": named(cast("int | None", tokenizer.eos_token_id)),
        "of generation_config.json or config.json": named(*ends_of_folder(tokenizer)),
        "megadapo ends a response at": named(*stop_ids(tokenizer)),
    }
    return {what: tokens or "none" for what, tokens in ends.items()}


def _end_warnings(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    if opening := opened_thought(tokenizer):
        yield (
            f"the generation prompt ends with {opening!r}, so answers begin inside a thought: "
            "megadapo sft refuses one without a thought"
        )
    close = turn_end(tokenizer)
    if close is not None and close not in (tokenizer.eos_token_id, *ends_of_folder(tokenizer)):
        name = tokenizer.convert_ids_to_tokens(close)
        yield (
            f"the template closes turns with {name}, which is neither the end-of-sequence token "
            "nor in generation_config.json: megadapo ends responses there, but a server does not "
            f"until eos_token_id in generation_config.json has {close} (megadapo export adds it)"
        )


def _tables(
    model: str,
    answers: Sequence[Answer],
    glue: Sequence[Glue],
    smuggled: Sequence[Smuggled],
    ends: Mapping[str, str],
) -> str:
    tables = [
        TextTable(title=f"ends of turns, {model}", head=("", ""), rows=[*ends.items()]),
        TextTable(
            title="answers, if the conversation is rendered again (megadapo never does so)",
            head=("answer", "before user", "before tool", "at the end"),
            rows=[astuple(answer) for answer in answers],
        ),
        TextTable(
            title="glue after an answer, beside the rendering of the whole conversation",
            head=("messages", "first turn", "later turn", "text"),
            rows=[astuple(one) for one in glue],
        ),
        TextTable(
            title="control tokens that a text with all their names becomes",
            head=("way", "special", "others", "examples"),
            rows=[
                (one.way, f"{one.special}", f"{one.others}", "  ".join(one.examples))
                for one in smuggled
            ],
        ),
    ]
    # a template that refuses turns has ends alone
    shown = tables if glue else tables[:1]
    # tokens and templates of a folder may have escape sequences
    return printable("\n\n".join(table.text() for table in shown)) + "\n"
