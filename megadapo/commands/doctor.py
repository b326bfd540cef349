"""`megadapo doctor`: check this machine, its GPUs, every node of a cluster, or a chat template."""

from __future__ import annotations

import argparse
from pathlib import Path

from megadapo.commands.common import Commands, add_command
from megadapo.errors import ConfigError


def add(commands: Commands) -> None:
    parser = add_command(
        commands, "doctor", "check this machine, a cluster or a chat template, and print the facts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--cluster",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="check whether the nodes of a running Ray cluster fit together; default: the cluster "
        "of this machine",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="FOLDER",
        help="with --cluster: a run's folder, which every node must see",
    )
    parser.add_argument(
        "--node",
        nargs="?",
        type=int,
        default=False,
        metavar="GPUS",
        help="check whether a run can use the GPUs of this node: as many as GPUS or as the driver "
        "has, of one product, without memory errors, and able to multiply matrices and to "
        "all-reduce within 3 minutes",
    )
    parser.add_argument(
        "--template",
        metavar="MODEL",
        help="check the chat template of a model's folder or Hub name, or of a recipe's model with "
        "its data.chat_template_kwargs: turns that it would change, the tokens between turns, "
        "control tokens in texts, and the ends of turns",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.template is not None:
        if (arguments.node, arguments.cluster, arguments.folder) != (False, None, None):
            raise ConfigError(
                "--template checks no machine: leave out --node, --cluster and --folder"
            )
        from megadapo.doctor.template import doctor_template

        return doctor_template(arguments.template, as_json=arguments.json)
    if arguments.node is not False:
        if arguments.cluster is not None or arguments.folder is not None:
            raise ConfigError("--node checks this node alone: leave out --cluster and --folder")
        from megadapo.doctor.doctor import doctor_node

        return doctor_node(arguments.node, as_json=arguments.json)
    if arguments.cluster is not None:
        from megadapo.doctor.cluster import doctor_cluster

        folder = arguments.folder and arguments.folder.absolute()
        return doctor_cluster(arguments.cluster, folder, as_json=arguments.json)
    if arguments.folder is not None:
        raise ConfigError("--folder needs --cluster")
    from megadapo.doctor.doctor import doctor

    return doctor(as_json=arguments.json)
