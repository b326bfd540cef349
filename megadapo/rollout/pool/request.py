"""`engines.json` in a run's folder: the number of engines that is wanted, and which ones leave.

The file holds a wish and no command, so none can be lost or followed twice: the driver compares it
with the engines that it has. Any process on any machine that sees the folder may replace it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from megadapo.errors import DataError
from megadapo.observe.files import replace_text

REQUEST_FILE = "engines.json"
MAX_BYTES = 1 << 16
"""Largest file that is read: any user who may write to the folder can replace it."""
MAX_ENGINES = 4096
MAX_WITHIN_S = 86400.0
WITHIN_S = 600.0
"""Default seconds in which an engine that leaves may finish its groups."""

Name = Annotated[str, Field(max_length=256)]


class EngineRequest(BaseModel):
    """The content of `engines.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    num_engines: Annotated[int, Field(ge=1, le=MAX_ENGINES)]
    """Number of engines that the run should have, without one reserved for evaluation."""
    driver: Name = ""
    """Driver that knows engines and nodes by the names below; any other ignores them."""
    leave: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, max_length=MAX_ENGINES)] = ()
    """Numbers of engines that should leave. Others replace them if `num_engines` asks for it."""
    leave_nodes: Annotated[tuple[Name, ...], Field(strict=False, max_length=MAX_ENGINES)] = ()
    """Addresses of nodes that all engines should leave."""
    within_s: Annotated[float, Field(ge=0.0, le=MAX_WITHIN_S)] = WITHIN_S
    """Seconds in which engines that leave may finish their groups."""

    def for_driver(self, driver: str) -> EngineRequest:
        """Return the part of the request that a driver can follow."""
        if driver == self.driver:
            return self
        return EngineRequest(num_engines=self.num_engines, within_s=self.within_s)


def read_request(folder: Path) -> EngineRequest | None:
    """Return the request in a run's folder; None without one.

    Raises:
        DataError: the file cannot be read, or it is no request.
    """
    path = folder / REQUEST_FILE
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > MAX_BYTES:
        raise DataError(f"{path} is larger than {MAX_BYTES} bytes: {_REMEDY}")
    try:
        return EngineRequest.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, problem["loc"]))
        where = f"{key}: " if key else ""
        raise DataError(f"{path}: {where}{problem['msg']}: {_REMEDY}") from None


def write_request(folder: Path, request: EngineRequest) -> None:
    """Replace the request in a run's folder."""
    replace_text(folder / REQUEST_FILE, request.model_dump_json(indent=2) + "\n")


_REMEDY = "remove it; megadapo engines --add or --remove then writes another one"
