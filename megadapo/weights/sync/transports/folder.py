"""Updates as files in a folder that trainer and engines both see, such as shared storage.

Each update has its own folder `v<version>`, with one safetensors file per bucket, and a manifest
that lists their sizes and checksums. A file gets its name when it is complete, and the manifest is
the last one, so every file that it lists must be readable.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megadapo.errors import WeightError
from megadapo.weights.disk.files import remove_folder
from megadapo.weights.sync.transports.interface import Message, Offer, Outbox

MANIFEST = "manifest.json"
POLL_S = 0.2
"""Interval between checks for files that are not there yet."""


class WrittenFile(BaseModel):
    """The manifest's entry of one file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    num_bytes: int
    sha256: dict[str, str]
    """Tensor name, which is its offset in the bucket -> digest of its bytes."""


class Manifest(BaseModel):
    """The list of files of an update."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    version: int
    base: int | None
    """Version that a delta update changes; None: all weights are here."""
    files: dict[str, WrittenFile]

    def write(self, folder: Path) -> None:
        """Complete an update after all of its files have been written."""
        with _complete_file(_version_folder(folder, self.version) / MANIFEST) as path:
            path.write_text(self.model_dump_json())


class FolderOutbox(Outbox):
    """One bucket on this trainer rank's device; each round becomes a file."""

    def __init__(self, folder: Path, num_bytes: int, device: torch.device, *, rank: int) -> None:
        super().__init__(torch.empty(1, num_bytes, dtype=torch.uint8, device=device))
        self._folder, self._rank = folder, rank
        self._version = 0
        self.written: dict[str, WrittenFile] = {}
        """Files of the present update."""

    def offer(self) -> Offer:
        return {"folder": str(self._folder)}

    def begin(self, version: int) -> None:
        self._version, self.written = version, {}

    def post(self, round_number: int, messages: Sequence[Message]) -> None:
        """Write a file, unless it would be empty."""
        if not messages:
            return
        (bucket,) = self._memory
        tensors = {
            str(one.offset): bucket.narrow(0, one.offset, one.num_bytes).to("cpu", copy=True)
            for one in messages
        }
        path = _version_folder(self._folder, self._version) / _name(self._rank, round_number)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _complete_file(path) as partial:
            save_file(tensors, partial)
            num_bytes = partial.stat().st_size
        digests = {name: _digest(tensor) for name, tensor in tensors.items()}
        self.written[path.name] = WrittenFile(num_bytes=num_bytes, sha256=digests)


class FolderInbox:
    """A reader of the updates that the trainer ranks write."""

    def __init__(self, offers: Sequence[Offer | None], device: torch.device) -> None:
        offer = offers[0]
        assert offer is not None, "every trainer rank offers the folder"
        self._folder, self._device = Path(offer["folder"]), device
        self._manifest: Manifest | None = None

    def open(self, version: int, *, current: int | None, wait_s: float) -> None:
        """Open an update as soon as all of its files are complete.

        Args:
            version: Version of the update.
            current: Version of this rank's weights; None if they are incomplete.
            wait_s: Seconds to wait for files, which storage may show late.

        Raises:
            WeightError: The update is not complete by then, has another version, or changes other
                weights than the current ones.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                self._manifest = self._read_manifest(version)
                break
            except WeightError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(POLL_S)
        base = self._manifest.base
        if base is not None and base != current:
            self._manifest = None
            raise WeightError(
                f"Update {version} changes version {base}, but the engine has {current}."
            )

    def receive(self, round_number: int, messages: Sequence[Message]) -> Iterator[torch.Tensor]:
        """Yield the bytes of each message, checked against the manifest's digest."""
        for message in messages:
            yield self._read(round_number, message).to(self._device)

    def close(self) -> None:
        self._manifest = None

    def is_open(self, version: int) -> bool:
        return self._manifest is not None and self._manifest.version == version

    def _read_manifest(self, version: int) -> Manifest:
        """Read an update's manifest and check the sizes of its files."""
        folder = _version_folder(self._folder, version)
        try:
            manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
            if manifest.version != version:
                raise WeightError(f"{folder} holds update {manifest.version}, not {version}.")
            for name, file in manifest.files.items():
                # the name of a damaged manifest must not lead to another folder
                if not re.fullmatch(r"rank-\d+-bucket-\d+\.safetensors", name):
                    raise WeightError(f"{folder / MANIFEST} names a file {name!r}.")
                if (size := (folder / name).stat().st_size) != file.num_bytes:
                    raise WeightError(f"{folder / name} has {size} of {file.num_bytes} bytes.")
        except OSError as error:
            raise WeightError(f"Update {version} is not there: {error}") from None
        except ValidationError as error:
            raise WeightError(f"{folder / MANIFEST} is damaged: {error}") from None
        return manifest

    def _read(self, round_number: int, message: Message) -> torch.Tensor:
        manifest = self._manifest
        assert manifest is not None, "open an update first"
        name, key = _name(message.sender, round_number), str(message.offset)
        path = _version_folder(self._folder, manifest.version) / name
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(key)
            expected = manifest.files[name].sha256[key]
        except (OSError, SafetensorError, KeyError) as error:
            raise WeightError(f"{path} cannot be read: {error}") from None
        if len(tensor) != message.num_bytes or _digest(tensor) != expected:
            raise WeightError(f"{path} differs from its checksum.")
        return tensor


def remove_other_updates(folder: Path, version: int) -> None:
    """Remove all updates but one."""
    for entry in folder.iterdir():
        if re.fullmatch(r"v\d+", entry.name) and entry != _version_folder(folder, version):
            remove_folder(entry)


@contextmanager
def _complete_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to; on exit the file is on the disk and gets its name."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def _version_folder(folder: Path, version: int) -> Path:
    return folder / f"v{version}"


def _name(rank: int, round_number: int) -> str:
    return f"rank-{rank}-bucket-{round_number}.safetensors"


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().data).hexdigest()
