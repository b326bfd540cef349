"""The objectives to compare: the run's own and those of `--set`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeAlias, get_args

from megadapo.algorithm.config import (
    ADVANTAGES_WITH_KEY,
    AGGREGATIONS_WITH_KEY,
    Aggregation,
    AlgorithmConfig,
)
from megadapo.algorithm.objective import KEYS_OF_GATE, PolicyObjective
from megadapo.config import RunConfig, from_dict, to_dict
from megadapo.config.problems import known_keys
from megadapo.config.recipe import KeyPath, parse_override, with_key
from megadapo.errors import ConfigError

SECTION = "algorithm"
OBJECTIVE = (SECTION, "objective")
OWN_NAME = "the run's own"
WITHOUT_EFFECT = ("passes", "max_kl", "reference", "kl_control", "entropy_control", "pretraining")
"""Parts of `[algorithm]` that change no loss of a saved batch."""
_NEXT_KEY = re.compile(r",\s*(?=[A-Za-z_][\w.]*=)")


Alternative: TypeAlias = tuple[str, RunConfig]
"""Name of an objective, and the configuration of a whole run with it."""


def alternatives(config: RunConfig, texts: Sequence[str]) -> list[Alternative]:
    """Return the run's own objective, then one for each text KEY=VALUE[,KEY=VALUE...].

    Raises:
        ConfigError: a key cannot be set, a value is refused, or the objective needs more than a
            saved batch.
    """
    found = [(OWN_NAME, config)]
    for problem in _unsupported(config):
        raise ConfigError(problem)
    for text in texts:
        changed = _with_keys(config, text)
        for problem in _unsupported(changed, own=config):
            raise ConfigError(f"--set {text}: {problem}")
        # all keys have the same section
        name = re.sub(rf"(^|,\s*){SECTION}\.", r"\1", text)
        found.append((name, changed))
    return found


def all_aggregations(config: RunConfig) -> list[str]:
    """Return a text for each `algorithm.loss_aggregation` but the run's own.

    "balanced" is left out where it cannot be set.
    """
    algorithm, longest = config.algorithm, config.rollout.max_response_tokens
    left_out = {algorithm.loss_aggregation}
    if not algorithm.compares_responses:
        left_out.add("balanced")
    names = (name for name in get_args(Aggregation) if name not in left_out)
    text = f",{SECTION}.loss_length={algorithm.loss_length or longest}"
    length = dict.fromkeys(AGGREGATIONS_WITH_KEY["loss_length"], text)
    return [f"{SECTION}.loss_aggregation={name}{length.get(name, '')}" for name in names]


def settable_keys() -> list[str]:
    """Return the dotted keys that an alternative may set."""
    keys = [f"{SECTION}.{key}" for key in known_keys(AlgorithmConfig)]
    sections = {key.rpartition(".")[0] for key in keys} | {SECTION}
    return [key for key in keys if key not in sections and key.split(".")[1] not in WITHOUT_EFFECT]


def _with_keys(config: RunConfig, text: str) -> RunConfig:
    """Return the run's configuration with the keys of one alternative."""
    table, known, keys = to_dict(config), settable_keys(), set[KeyPath]()
    parts = [part.strip() for part in _NEXT_KEY.split(text)]
    for part in parts:
        name, equals, _ = part.partition("=")
        if name not in known:
            raise ConfigError(f"--set {text}: {_unknown(name, known)}")
        if not equals:
            raise ConfigError(f"--set {text}: {name} has no value; write {name}=VALUE")
        path, value, _ = parse_override(part)
        keys.add(path)
        table = with_key(table, path, value)
    # another objective does not read all keys of the run's own
    if table[SECTION]["advantage"] != "gae":
        table["critic"] = {}
    choices = {"advantage": ADVANTAGES_WITH_KEY, "loss_aggregation": AGGREGATIONS_WITH_KEY}
    for choice, readers in choices.items():
        for name, values in readers.items():
            if table[SECTION][choice] not in values and (SECTION, name) not in keys:
                table = with_key(table, (SECTION, name), AlgorithmConfig.model_fields[name].default)
    objective = table[SECTION]["objective"]
    sections, unread = ["reference", "kl_control", "entropy_control"], list[str]()
    if objective["gate"] != "bapo" and all(key[1] != "bapo" for key in keys):
        sections.append("bapo")
    table[SECTION] |= dict.fromkeys(sections, {})
    if (*OBJECTIVE, "gate") in keys:
        read = KEYS_OF_GATE.get(objective["gate"], ())
        unread += [name for name in chain(*KEYS_OF_GATE.values()) if name not in read]
    if objective["kl_coef"] == 0:
        unread += ["kl_in", "kl_value", "kl_gradient"]
    for name in unread:
        if (*OBJECTIVE, name) not in keys:
            default = PolicyObjective.model_fields[name].default
            table = with_key(table, (*OBJECTIVE, name), default)
    try:
        return from_dict(table)
    except ConfigError as error:
        raise ConfigError(f"--set {text}: {error}") from None


def _unknown(name: str, known: Sequence[str]) -> str:
    """Explain that a key cannot be set, with the key that was probably meant."""
    last = name.rpartition(".")[2]
    namesakes = [key for key in known if key.rpartition(".")[2] == last]
    near = namesakes or difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    part = name.split(".")
    if part[0] == SECTION and len(part) > 1 and part[1] in WITHOUT_EFFECT:
        reason = "changes no loss of a saved batch"
    elif name.startswith(f"{SECTION}."):
        reason = "is not a key with a value"
    else:
        reason = f"is not a key of [{SECTION}]"
    return f"{name} {reason}; did you mean {' or '.join(near)}?"


def _unsupported(config: RunConfig, own: RunConfig | None = None) -> Iterator[str]:
    """Yield what an objective needs beside a saved batch and the policy's weights."""
    algorithm = config.algorithm
    if algorithm.advantage == "gae" and own is not None and own.algorithm.advantage != "gae":
        yield 'algorithm.advantage = "gae": the run has no critic'
    has_reference = own is None or own.algorithm.objective.kl_coef != 0.0
    if algorithm.objective.kl_coef != 0.0 and not has_reference:
        yield "algorithm.objective.kl_coef: the run has no reference policy to compare with"
