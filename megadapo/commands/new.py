"""`megadapo new`: write a recipe for a model, rows and a machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megadapo.commands.common import Commands, add_command
from megadapo.errors import ConfigError

if TYPE_CHECKING:
    from megadapo.config import RunConfig
    from megadapo.data.group import Group

ABOUT = """Write a recipe for megadapo train: read the model, the rows and this machine, sample a
few responses of the model, choose sizes, lengths and the learning rate by the rules of docs/new.md,
and forecast the time of a step. With --gpu, plan for other GPUs and sample nothing."""


def add(commands: Commands) -> None:
    parser = add_command(
        commands, "new", "write a recipe for a model, rows and this machine", takes_overrides=True
    )
    parser.description = ABOUT
    parser.add_argument("model", help="folder of the model, or its name on the Hub")
    parser.add_argument("data", help="rows, as data.train names them, of which some are held out")
    parser.add_argument("--held-out", metavar="DATA", help="rows to evaluate on instead of these")
    parser.add_argument("--reward", metavar="MODULE:FUNCTION", help="function that scores")
    parser.add_argument("--environment", metavar="MODULE:CLASS", help="environment that answers")
    parser.add_argument("--output", type=Path, default=Path("recipe.toml"), metavar="FILE")
    parser.add_argument("--gpu", metavar="CARD", help="plan for this card, such as RTX-4090")
    parser.add_argument("--gpus", type=int, metavar="N", help="with --gpu: their number")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from megadapo.commands.plan import card_of
    from megadapo.config.recipe import shipped
    from megadapo.plan.new.draft import Draft
    from megadapo.plan.new.recipe import write_recipe

    output: Path = arguments.output
    if output.exists():
        raise ConfigError(f"{output} exists: name another file with --output")
    if arguments.gpus is not None and arguments.gpu is None:
        raise ConfigError("--gpus needs --gpu: this machine's own GPUs are all used")
    draft = Draft(arguments.overrides)
    draft.set("run.folder", f"runs/{output.stem}")
    draft.set("model.path", shipped(arguments.model))
    if arguments.environment is not None:
        draft.set("rollout.environments", ({"environment": arguments.environment},))
    if (function := arguments.reward or (arguments.environment and "environment")) is not None:
        draft.set("reward.functions", (function,))
    gpus = None if arguments.gpu is None else (card_of(arguments.gpu), arguments.gpus or 1)
    lines = write_recipe(
        draft, arguments.data, arguments.held_out, output, gpus=gpus, sample=_sample
    )
    print(f"{output}:", *lines, sep="\n  ")
    print(f"Next: megadapo train {output}")
    return 0


def _sample(config: RunConfig) -> list[Group]:
    from megadapo.commands.rollout import sample_steps

    [step] = sample_steps(config, num_steps=1, keep=None, max_per_prompt=None)
    return [entry.group for entry in step.sampled.saved]
