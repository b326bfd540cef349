"""A recipe for a model, rows, a reward and a machine, as `megadapo new` writes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from megadapo.cluster.machine import inspect_machine
from megadapo.config import RunConfig
from megadapo.data import reasoning_gym
from megadapo.data.group import NO_ANSWER, Group
from megadapo.data.prompts import Prompt, render
from megadapo.data.rows import ALL_COLUMNS, Row
from megadapo.data.sources import is_built_in, read_rows, whole_rows
from megadapo.errors import ConfigError, DataError
from megadapo.models.description import describe_model
from megadapo.models.folder import find_hf_config, resolve_model_folder
from megadapo.plan.cards import Card, card_of
from megadapo.plan.new import sizes
from megadapo.plan.new.draft import Draft
from megadapo.plan.new.rows import NUM_HELD_OUT, hold_out, likely_columns
from megadapo.rewards.config import REASONING_GYM
from megadapo.rewards.rules import Rule, as_number
from megadapo.tokens.tokenizer import read_tokenizer

SAMPLING = {
    "sampling.prompts_per_step": sizes.NUM_SAMPLED,
    "sampling.responses_per_prompt": sizes.GROUP,
    "sampling.selection": "all",
    "algorithm.responses_per_mini_batch": sizes.NUM_SAMPLED,
    "observe.saved_groups": "all",
}
"""Keys of the samples."""
UNMIXED = (
    "WARNING: the responses of each group have the same score, which teaches nothing: take easier "
    "or harder rows, megadapo sft first, examples (data.columns.examples), or a graded reward"
)


def write_recipe(
    draft: Draft,
    source: str,
    held_out: str | None,
    output: Path,
    *,
    gpus: tuple[Card, int] | None,
    sample: Callable[[RunConfig], Sequence[Group]],
) -> list[str]:
    """Complete a recipe that has a model and functions; write it and return lines about it.

    Args:
        source: training rows, of which some are held out if `held_out` names no others.
        gpus: kind and number of the GPUs to plan for; None: sample on this machine.
        sample: returns the groups of a configuration's first step.
    """
    # the recipe is valid with these until its sizes are chosen
    draft.set("run.num_steps", sizes.GPU_STEPS)
    sizes.set_batch(draft, sizes.NUM_SAMPLED, sizes.GROUP)
    draft.set("algorithm.overlong_buffer", 0)
    rows, others = _read_rows(draft, source, held_out, output)
    rules = _set_reward(draft, rows)
    facts = _read_facts(draft, rows, others, gpus)
    sizes.choose_sizes(draft, facts)
    lines = ["nothing was sampled: lengths are a guess"]
    if gpus is None:
        rule = {"reward.rule": rules[-1]} if rules else {}
        groups = sample(draft.config(SAMPLING | rule))
        samples = sizes.Samples(groups=groups, scores=_set_rule(draft, groups, rules))
        sizes.choose_sizes(draft, facts := replace(facts, samples=samples))
        scores = [*chain(*samples.scores)]
        lines = [
            f"{len(scores)} samples of the base model: mean score {sum(scores) / len(scores):.2f}, "
            f"{samples.num_mixed} of {len(groups)} groups mixed, mean length "
            f"{samples.lengths.mean():.0f} tokens",
            *[UNMIXED] * (samples.num_mixed == 0),
        ]
    reward = draft.config().reward
    for row in (*rows, *others):
        try:
            reward.check_gold(row.ground_truth, row.data_source)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
    minutes, steps = sizes.forecast(draft, facts) / 60, draft.config().run.num_steps
    total = minutes * steps
    run = f"{total:.0f} minutes" if total < 120 else f"{total / 60:.0f} hours"
    lines.append(f"forecast: about {minutes:.2g} minutes a step, {run} for {steps} steps")
    head = "Written by megadapo new (docs/new.md). Keys with their default value are left out."
    output.write_text(draft.text([head, *lines]), encoding="utf-8")
    return lines


def _read_rows(
    draft: Draft, source: str, held_out: str | None, output: Path
) -> tuple[list[Row], list[Row]]:
    """Set the sources and their columns; return training and held-out rows."""
    draft.set("data.train", source)
    if is_built_in(source):
        name = re.sub(r":train:\d+(:\d+)?$", f":held_out:{NUM_HELD_OUT}", source)
        held_out = held_out or name
    else:
        unusual = likely_columns(whole_rows(source), draft.config().data.columns)
        for key, name in unusual.items():
            draft.set(f"data.columns.{key}", name)
    columns, reason = draft.config().data.columns, ""
    if held_out is None:
        rows, reason = read_rows(source, columns, further=(ALL_COLUMNS,)), f"rows of {source}"
        parts = hold_out(list(rows), output.with_suffix(""))
    else:
        parts = [(one, list(read_rows(one, columns))) for one in (source, held_out)]
    (source, train), (held_out, others) = parts
    draft.set("data.train", source, reason)
    draft.set("data.held_out", held_out)
    if {row.messages for row in train} & {row.messages for row in others}:
        draft.set("data.overlap", "drop", "some prompts are in both")
    return train, others


def _set_reward(draft: Draft, rows: Sequence[Row]) -> list[Rule]:
    """Set the function of a source that has one; without any, return the rules to choose from."""
    if all(row.data_source == reasoning_gym.NAME for row in rows):
        draft.set("reward.functions", (REASONING_GYM,))
    if not draft.config().reward.is_rule_alone:
        return []
    are_numbers = all(as_number(str(row.ground_truth)) is not None for row in rows)
    last: Rule = "last_number" if are_numbers else "exact_text"
    return ["answer", "boxed", last]


def _read_facts(
    draft: Draft, rows: list[Row], held_out: list[Row], gpus: tuple[Card, int] | None
) -> sizes.Facts:
    machine, path = inspect_machine(), draft.config().model.path
    prompt_tokens = draft.config().data.max_prompt_tokens
    card, num_gpus = gpus or (None, 1)
    if gpus is None:
        path = str(resolve_model_folder(path, with_weights=True))
        tokenizer = read_tokenizer(path)
        prompts = {row.messages for row in (*rows, *held_out)}
        longest = max(len(render(Prompt("", one, "", ""), tokenizer)) for one in prompts)
        drops = draft.config().data.overlong_prompts == "drop"
        prompt_tokens = min(longest, prompt_tokens) if drops else longest
    if gpus is None and machine.uses_cuda:
        card, num_gpus = card_of(machine.gpus[0].name), len(machine.gpus)
        if card is None:
            raise ConfigError(f"{machine.gpus[0].name}: name a similar card with --gpu and --gpus")
    return sizes.Facts(
        model=describe_model(find_hf_config(path)),
        prompt_tokens=prompt_tokens,
        num_held_out=len(held_out),
        card=card,
        num_gpus=num_gpus,
        memory_gib=machine.memory_gib,
    )


def _set_rule(draft: Draft, groups: Sequence[Group], rules: Sequence[Rule]) -> list[list[float]]:
    """Set the first rule that finds an answer in half of the responses; return all scores.

    Without rules the scores are those of the reward functions.
    """
    reward = draft.config().reward
    scores = [[float(one) for one in group.correct or group.rewards] for group in groups]
    for rule in rules:
        rule = draft.set("reward.rule", rule)
        found = [
            [reward.score(one.text, group.prompt.ground_truth, rule) for one in group.responses]
            for group in groups
        ]
        scores = [[float(one.reward > 0.0) for one in group] for group in found]
        answers = [one.answer != NO_ANSWER for one in chain(*found)]
        share = sum(answers) / len(answers)
        draft.set("reward.rule", rule, f"it finds an answer in {share:.0%} of the samples")
        if share >= 0.5:
            break
    return scores
