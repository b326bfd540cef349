"""`megadapo engines`: list the engines of a run, and let some join or leave while it works."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.commands.common import Commands, add_command, seconds
from megadapo.observe.tables import TextTable, formatted, printable

if TYPE_CHECKING:
    from megadapo.rollout.pool.request import EngineRequest
    from megadapo.run.state.status import Status


def add(commands: Commands) -> None:
    parser = add_command(commands, "engines", "list a run's engines; let some join or leave")
    parser.description = (
        "List the engines of a run, or write to engines.json in its folder how many it should "
        "have; the run follows within seconds, and a run that is stopped when it resumes. The "
        'engines must have places of their own: cluster.placement = "separate".'
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--add", type=_count, metavar="N", help="want N engines more")
    number.add_argument("--remove", type=_count, metavar="N", help="want N engines fewer")
    number.add_argument(
        "--remove-engine",
        type=int,
        action="append",
        metavar="NUMBER",
        help="want one engine fewer, and this one to leave; may be repeated",
    )
    number.add_argument(
        "--leave-node",
        action="append",
        metavar="ADDRESS",
        help="want as many engines, but none on this node, as when its machine will end",
    )
    parser.add_argument(
        "--within",
        type=seconds,
        metavar="TIME",
        help="time in which engines that leave may finish their groups, such as 90s or 10m; after "
        "it other engines generate these again; default: 10m",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List or change a run's engines."""
    from megadapo.commands.status import observed_status
    from megadapo.rollout.pool.request import write_request

    folder: Path = arguments.run_folder
    status = observed_status(folder)
    request = _wanted(folder, status)
    changed = _changed(request, status, arguments)
    if changed is None:
        _list(status, request, as_json=arguments.json)
        return 0
    write_request(folder, changed)
    when = "the run follows" + " when it resumes" * (status.state != "running")
    print(f"engines wanted: {changed.num_engines}, before: {request.num_engines}; {when}")
    return 0


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return count


def _wanted(folder: Path, status: Status) -> EngineRequest:
    """Return the present request, or the number of engines that the run wants without one."""
    from megadapo.errors import ConfigError, DataError
    from megadapo.observe.run_records import RESOLVED_FILE, RunRecords
    from megadapo.rollout.pool.request import EngineRequest, read_request

    config = RunRecords(folder).config
    try:
        placement = config["cluster"]["placement"]
        num_engines = int(config["rollout"]["num_engines"])
    except (KeyError, TypeError, ValueError) as error:
        path = folder / RESOLVED_FILE
        raise DataError(f"{path} is missing or no run's configuration: {error!r}") from error
    if placement != "separate":
        raise ConfigError(
            f'cluster.placement = "{placement}": the engines of this run share the slots of its '
            'trainer, so none can join or leave; only with "separate" they can'
        )
    if status.state == "running" and status.engines is not None:
        # fewer than the recipe's after a start with --allow-fewer
        num_engines = status.engines["wanted"]
    found = read_request(folder) or EngineRequest(num_engines=num_engines)
    return found.for_driver(status.driver)


def _changed(
    request: EngineRequest, status: Status, arguments: argparse.Namespace
) -> EngineRequest | None:
    """Return the request with the change that the arguments ask for; None: they ask for none."""
    from megadapo.errors import ConfigError
    from megadapo.rollout.pool.request import MAX_ENGINES, WITHIN_S

    # an engine that was named before is not counted again
    numbers = set(arguments.remove_engine or ()) - set(request.leave)
    nodes: list[str] = arguments.leave_node or []
    change = (arguments.add or 0) - (arguments.remove or 0) - len(numbers)
    if not change and not nodes:
        if arguments.within is not None:
            raise ConfigError("--within is for --remove, --remove-engine and --leave-node")
        return None
    if numbers or nodes:
        _check_named(status, numbers, nodes)
    num_engines = request.num_engines + change
    if num_engines < 1:
        raise ConfigError(
            f"{request.num_engines} engines are wanted: the last one cannot be removed; to stop "
            "the run, write the file stop into its folder"
        )
    if num_engines > MAX_ENGINES:
        raise ConfigError(f"a run has at most {MAX_ENGINES} engines")
    update: dict[str, Any] = {
        "num_engines": num_engines,
        "driver": status.driver,
        "leave": tuple(sorted({*request.leave, *numbers})),
        "leave_nodes": tuple(sorted({*request.leave_nodes, *nodes})),
        "within_s": WITHIN_S if arguments.within is None else arguments.within,
    }
    return type(request)(**{**request.model_dump(), **update})


def _check_named(status: Status, numbers: Collection[int], nodes: Collection[str]) -> None:
    """Check that the run has the engines and nodes that are named, and trains on none of these."""
    from megadapo.errors import ConfigError

    if status.state != "running" or status.engines is None:
        raise ConfigError("only a run that is running knows its engines and nodes by name")
    engines = status.engines["engines"]
    known = {engine["number"] for engine in engines}
    for number in numbers:
        if number not in known:
            raise ConfigError(f"the run has no engine {number}, only {sorted(known)}")
    addresses = {engine["node"] for engine in engines}
    for node in nodes:
        if node in status.engines["trainer_nodes"]:
            raise ConfigError(
                f"trainer ranks are on node {node}: to save the run before the node ends, write "
                'a file stop that begins with "restart" into its folder'
            )
        if node not in addresses:
            raise ConfigError(f"no engine is on node {node}, only on {sorted(addresses)}")


def _list(status: Status, request: EngineRequest, *, as_json: bool) -> None:
    """Print the engines as the driver reported them."""
    report = status.engines if status.state == "running" else None
    if as_json:
        print(json.dumps({"wanted": request.num_engines, "state": status.state, "report": report}))
        return
    if report is None:
        print(f"the run is {status.state}; engines wanted: {request.num_engines}")
        return
    rows = [
        [printable(str(engine[name])) for name in ("number", "node", "state", "load", "tokens")]
        + [formatted(engine["tokens_per_s"], ".1f")]
        for engine in report["engines"]
    ]
    print(
        TextTable(head=("engine", "node", "state", "load", "tokens", "tokens/s"), rows=rows).text()
    )
    waiting = report["waiting_for_slots"]
    print(f"engines wanted: {request.num_engines}; waiting for free slots: {waiting}")
    if report["problem"]:
        print(f"not followed: {printable(str(report['problem']))}")
