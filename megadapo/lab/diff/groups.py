"""Differences between the saved groups of a step, and between two runs' responses to one prompt.

They are of rollout, score, selection and training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from megadapo.algorithm.mini_batches import mini_batch_sizes
from megadapo.data.batch import in_training_order
from megadapo.data.group import Response
from megadapo.lab.diff.difference import Difference, Phase, Row, differing_rows, row, share
from megadapo.observe.rollouts.saved_group import SavedGroup, SavedResponse
from megadapo.observe.tables import count


def first_difference(one: np.ndarray | None, two: np.ndarray | None) -> int | None:
    """Return the first index at which two arrays differ in a bit or end; None if none does."""
    if one is None or two is None:
        return None if one is two else 0
    length = min(len(one), len(two))
    kinds = [values[:length].astype(values.dtype.newbyteorder("=")) for values in (one, two)]
    bits = [values.view(np.int32) for values in kinds]
    places = np.flatnonzero(bits[0] != bits[1])
    if len(places):
        return int(places[0])
    return None if len(one) == len(two) else length


def token_advantages(saved: SavedResponse) -> np.ndarray:
    """Return the [n] float32 advantages of the tokens, also if all tokens have the same one."""
    if saved.advantages is not None:
        return saved.advantages
    value = np.nan if saved.advantage is None else saved.advantage
    return np.full(len(saved.response.token_ids), value, dtype=np.float32)


def rollout_place(one: SavedResponse, two: SavedResponse) -> tuple[int, str] | None:
    """Return the first token at which two responses differ, and the differing value.

    A value of the whole response counts as one after its last token.
    """
    a, b = one.response, two.response
    found = [
        (place, field)
        for field, x, y in (
            ("token", a.token_ids, b.token_ids),
            ("policy version", a.policy_versions, b.policy_versions),
            ("engine log-prob", a.logprobs, b.logprobs),
        )
        if (place := first_difference(x, y)) is not None
    ]
    if found:
        # of several at one place, the first is the cause
        return min(found, key=itemgetter(0))
    rows = whole_rows(a, b)
    return (len(a.token_ids), rows[0][0]) if rows else None


def whole_rows(a: Response, b: Response) -> tuple[Row, ...]:
    """Return the differing values of two whole responses."""
    return differing_rows(
        (name, x, y) for (name, x), (_, y) in zip(_whole(a), _whole(b), strict=True)
    )


def _whole(response: Response) -> list[tuple[str, Any]]:
    """Return the values of a whole response; NaN as text, which equals itself."""
    experts = response.experts
    return [
        ("finish reason", response.finish_reason),
        ("text", response.text),
        ("branch", response.branch),
        ("tool calls", repr(response.turns)),
        ("entropy", repr(response.entropy)),
        ("experts", None if experts is None else (experts.shape, experts.tobytes())),
    ]


def token_rows(one: SavedResponse, two: SavedResponse, place: int) -> list[Row]:
    """Return the values of a token, and of its response, in both runs."""

    def values(saved: SavedResponse) -> list[object]:
        response, length = saved.response, len(saved.response.token_ids)
        own: list[object] = ["ended", None, None]
        if place < length:
            token = f"{response.token_ids[place]} {saved.tokens[place]!r}"
            own = [token, response.policy_versions[place], response.logprobs[place]]
        return [*own, f"{length}, {response.finish_reason}"]

    names = ("token", "policy version", "engine log-prob", "length, end")
    return [row(*three) for three in zip(names, values(one), values(two), strict=True)]


def about_tokens(one: SavedResponse, two: SavedResponse, place: int, field: str) -> list[str]:
    """Return the evidence about the cause of a response's first difference."""
    a, b = one.response, two.response
    length = min(len(a.token_ids), len(b.token_ids))
    same_tokens = np.array_equal(a.token_ids, b.token_ids)
    same_logprobs = first_difference(a.logprobs, b.logprobs) is None
    if field == "policy version" and same_tokens:
        num = int((a.policy_versions != b.policy_versions).sum())
        if same_logprobs:
            return [
                f"Only the label differs, on {count(num, 'token')}: tokens and log-probs are equal."
            ]
        return [f"{count(num, 'token')} are from other weights."]
    if field == "engine log-prob":
        first = first_difference(a.token_ids, b.token_ids)
        others = (
            "all tokens are equal" if first is None else f"token {first + 1} is the first other"
        )
        return [f"The engines computed other log-probs for equal tokens; {others}."]
    if field != "token":
        return ["The tokens are equal."]
    if same_logprobs:
        return ["All log-probs of the response are equal: the token was changed after sampling."]
    later = int((a.token_ids[place + 1 : length] == b.token_ids[place + 1 : length]).sum())
    num_later = max(0, length - place - 1)
    before = f"The {count(place, 'token')} before it and their log-probs are equal"
    start = (
        "The responses part at their first token"
        if place == 0
        else f"{before}: the weights were the same, the noise was not"
    )
    return [f"{start}. {later} of {count(num_later, 'later token')} agree."]


def moved_group(
    index: int,
    a: Mapping[int, SavedGroup],
    b: Mapping[int, SavedGroup],
    content: Callable[[SavedGroup], object],
) -> str:
    """Return a sentence if a group has another prompt index in B."""
    here, there = content(a[index]), content(b[index])
    if here == there:
        return ""
    in_b = next((i for i in sorted(b) if content(b[i]) == here), None)
    in_a = next((i for i in sorted(a) if content(a[i]) == there), None)
    if in_a is not None and in_a == in_b:
        return f"B has the groups {index} and {in_a} swapped."
    if in_a is not None:
        return f"Group {in_a} of A is group {index} of B."
    return "" if in_b is None else f"Group {index} of A is group {in_b} of B."


def tokens_of_group(group: SavedGroup) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(saved.response.token_ids.tolist()) for saved in group.responses)


def values_of_score(saved: SavedResponse) -> list[tuple[str, Any]]:
    score = saved.score
    return [
        ("reward", score.reward),
        ("correct", score.correct),
        ("answer", score.answer),
        ("rule", saved.rule_correct),
        ("cross-check", score.symbolic_correct),
        ("parts", score.parts),
        ("steps", score.steps),
        ("penalty", saved.penalty),
        ("shaped reward", saved.shaped_reward),
    ]


Groups = Mapping[int, SavedGroup]
"""The saved groups of a step by prompt index."""


@dataclass(frozen=True)
class StepGroups:
    """The saved groups of one step in both runs."""

    step: int
    a: Groups
    b: Groups
    is_complete: bool
    """Whether both runs saved every group of the step."""
    groups_per_mini_batch: int | None = None
    """Planned groups of an update, if both runs have as many."""

    def first(self, phase: Phase) -> Difference | None:
        """Return the first difference of a phase, with the number of groups that have one."""
        common = sorted(self.a.keys() & self.b.keys())
        find = _FINDERS[phase]
        found = [one for i in common if (one := next(find(self, i), None)) is not None]
        if phase == "selection" and self.is_complete:
            found += self._only_one_has()
        if not found:
            return None
        first = min(found, key=lambda one: one.group or 0)
        updates = self._mini_batches() if phase == "update" else {}
        order = list(updates)
        if trained := [one for one in found if one.group in updates]:
            first = min(trained, key=lambda one: order.index(one.group))
            number = updates[first.group]
            text = (
                f"It is in mini-batch {number}; log-probs of the mini-batches before it are equal."
            )
            if number == 1:
                text = (
                    "It is in mini-batch 1, before any update of the step: the batch differs, or "
                    "its order."
                )
            first = first.with_evidence(text)
        noun = "group" if self.is_complete else "saved group"
        total = len(self.a.keys() | self.b.keys())
        return first.with_evidence(share(len(found), total, noun, "in this phase"))

    def _only_one_has(self) -> Iterator[Difference]:
        for index in sorted(self.a.keys() ^ self.b.keys()):
            there = self.a.get(index) or self.b[index]
            # the number of groups that finish after the batch depends on the engines' speed
            if there.disposition != "dropped":
                pair = [groups.get(index) for groups in (self.a, self.b)]
                shown = [None if one is None else one.disposition for one in pair]
                text = f"Only {'A' if index in self.a else 'B'} has the group."
                yield self._found(index, "selection", "group", [row("group", *shown)], text)

    def _found(
        self,
        index: int,
        phase: Phase,
        field: str,
        rows: Sequence[Row],
        *evidence: str,
        response: int | None = None,
        token: int | None = None,
    ) -> Difference:
        return Difference(
            step=self.step,
            phase=phase,
            field=field,
            group=index,
            response=None if response is None else response + 1,
            token=None if token is None else token + 1,
            rows=tuple(rows),
            evidence=tuple(filter(None, evidence)),
        )

    def pairs(self, index: int) -> list[tuple[SavedResponse, SavedResponse]]:
        """Return the responses of a group in both runs, as far as both have them."""
        return list(zip(self.a[index].responses, self.b[index].responses, strict=False))

    # one finder per phase: each yields the differences of a group, the earliest first

    def rollout(self, index: int) -> Iterator[Difference]:
        """Yield differences of the prompt and of what the engines returned."""
        one, two = self.a[index], self.b[index]
        if one.prompt != two.prompt or one.prompt_ids != two.prompt_ids:
            rows = differing_rows(
                [
                    ("prompt", one.prompt.id, two.prompt.id),
                    ("question", one.prompt.messages[-1][1], two.prompt.messages[-1][1]),
                    ("gold answer", one.prompt.ground_truth, two.prompt.ground_truth),
                    ("tokens", one.prompt_ids, two.prompt_ids),
                ]
            )
            moved = moved_group(index, self.a, self.b, lambda group: group.prompt)
            yield self._found(index, "rollout", "prompt", rows, moved)
            return
        if len(one.responses) != len(two.responses):
            sizes = [row("responses", len(one.responses), len(two.responses))]
            yield self._found(index, "rollout", "number of responses", sizes)
        pairs = self.pairs(index)
        differing = [i for i, (x, y) in enumerate(pairs) if rollout_place(x, y) is not None]
        if not differing:
            return
        first = differing[0]
        place, field = rollout_place(*pairs[first]) or (0, "")
        moved = moved_group(index, self.a, self.b, tokens_of_group)
        extent = share(len(differing), len(pairs), "response", "in the group")
        evidence = (moved, *about_tokens(*pairs[first], place, field), extent)
        token: int | None = place
        shown = token_rows(*pairs[first], place)
        responses = [saved.response for saved in pairs[first]]
        if place == max(len(response.token_ids) for response in responses):
            # a value of the whole response
            token, shown = None, list(whole_rows(responses[0], responses[1]))
        yield self._found(index, "rollout", field, shown, *evidence, response=first, token=token)

    def score(self, index: int) -> Iterator[Difference]:
        """Yield differences of rewards and verdicts."""
        for number, (one, two) in enumerate(self.pairs(index)):
            rows = differing_rows(
                (name, first, second)
                for (name, first), (_, second) in zip(
                    values_of_score(one), values_of_score(two), strict=True
                )
                # a late cross-check is no verdict
                if name != "cross-check" or None not in (first, second)
            )
            if rows:
                is_same = rollout_place(one, two) is None
                text = f"The response itself is {'the same' if is_same else 'another'}."
                yield self._found(index, "score", rows[0][0], rows, text, response=number)
        if self.a[index].failures != self.b[index].failures:
            rows = (row("failures", self.a[index].failures, self.b[index].failures),)
            yield self._found(index, "score", "failures of functions", rows)

    def selection(self, index: int) -> Iterator[Difference]:
        """Yield a difference of the group's use."""
        one, two = self.a[index], self.b[index]
        rows = differing_rows(
            [
                ("disposition", one.disposition, two.disposition),
                ("from the reserve", one.from_reserve, two.from_reserve),
            ]
        )
        if rows:
            yield self._found(index, "selection", rows[0][0], rows)

    def advantages(self, index: int) -> Iterator[Difference]:
        """Yield differences of the advantages of responses and tokens."""
        for number, (one, two) in enumerate(self.pairs(index)):
            rows = differing_rows([("advantage", one.advantage, two.advantage)])
            place = None
            if one.advantages is not None or two.advantages is not None:
                values = token_advantages(one), token_advantages(two)
                place = first_difference(*values)
            if place is not None:
                shown = [v[place] if place < len(v) else None for v in values]
                rows = (*rows, row("advantage of the token", *shown))
            if rows:
                rewards = [row("shaped reward", one.shaped_reward, two.shaped_reward)]
                rows = (*rows, *rewards)
                args = {"response": number, "token": place}
                yield self._found(index, "advantages", "advantage", rows, **args)

    def trained(self, index: int, phase: Phase, field: str, name: str) -> Iterator[Difference]:
        """Yield differences of the trainer's log-probs before the update, or in it."""
        pairs = self.pairs(index)
        places = [first_difference(getattr(x, name), getattr(y, name)) for x, y in pairs]
        differing = [number for number, place in enumerate(places) if place is not None]
        for number in differing:
            one, two = pairs[number]
            place = places[number] or 0
            values = [getattr(x, name) for x in (one, two)]
            shown = [None if v is None or place >= len(v) else v[place] for v in values]
            rows = [*token_rows(one, two, place)[:1], row(field, *shown)]
            if (phase, place) != ("update", 0):
                rows.append(("tokens before it", "equal", "equal"))
            extent = share(len(differing), len(pairs), "response", "in the group")
            args = {"response": number, "token": place}
            yield self._found(index, phase, field, rows, extent, **args)

    def _mini_batches(self) -> dict[int | None, int]:
        """Return the mini-batch of each trained group, in training order; {} if not known."""
        trained = [one.group for one in self.a.values() if one.disposition == "trained"]
        if not trained or not self.is_complete or not self.groups_per_mini_batch:
            return {}
        ordered = in_training_order(trained, self.step - 1, self.groups_per_mini_batch)
        sizes = mini_batch_sizes(len(ordered), self.groups_per_mini_batch)
        numbers = [number for number, size in enumerate(sizes, start=1) for _ in range(size)]
        indices = (group.prompt_index for group in ordered)
        return dict(zip(indices, numbers, strict=True))


_FINDERS: dict[Phase, Callable[[StepGroups, int], Iterator[Difference]]] = {
    "rollout": StepGroups.rollout,
    "score": StepGroups.score,
    "selection": StepGroups.selection,
    "advantages": StepGroups.advantages,
    "old log-probs": lambda groups, index: groups.trained(
        index, "old log-probs", "old log-prob", "logprobs_old"
    ),
    "update": lambda groups, index: groups.trained(
        index, "update", "log-prob in the update", "logprobs_update"
    ),
}
