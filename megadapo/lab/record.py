"""JSON files of measurements: date, machine, versions and results."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from megadapo import __version__
from megadapo.cluster.machine import inspect_machine
from megadapo.observe.files import replace_text


def write_record(path: Path, results: Mapping[str, Any]) -> None:
    """Write results as JSON, below the date and the machine with the versions of its packages."""
    found = inspect_machine()
    cpu = None
    with contextlib.suppress(OSError):  # only Linux has this file
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = (line.split(":", 1)[1].strip() for line in lines if "model name" in line)
        cpu = next(names, None)
    machine = {
        "cpu": cpu,
        "cores": found.num_cores,
        "gpus": [gpu.name for gpu in found.gpus],
        "driver": found.driver,
        "system": found.system,
        "python": found.python,
        "versions": {
            "megadapo": __version__,
            "numpy": metadata.version("numpy"),
            **{name: version for name, version in found.packages.items() if version},
        },
    }
    record = {"date": datetime.now(UTC).date().isoformat(), "machine": machine, **results}
    replace_text(path, json.dumps(record, indent=1) + "\n", with_folder=True)
