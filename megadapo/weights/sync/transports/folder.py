"""Updates as files in a folder that trainer and engines both see: shared storage, or a mount of it.

Each update is a folder of its own, `v<version>`, of safetensors files, one for every bucket, and a
manifest that names them with their sizes and checksums. A file gets its name when it is complete,
and the manifest is the last: what it names can be read, or something is wrong.
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
from megadapo.weights.sync.transports.parcels import Offer, Parcel

MANIFEST = "manifest.json"
POLL_S = 0.2
"""Between two looks at a folder in which a file is not there yet."""


class WrittenFile(BaseModel):
    """What a manifest says of a file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    num_bytes: int
    sha256: dict[str, str]
    """Name of each tensor, which is its place in the bucket, and the digest of its bytes."""


class Manifest(BaseModel):
    """What an update consists of."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    version: int
    base: int | None
    """Version that the changes are of; None: all weights are here."""
    files: dict[str, WrittenFile]

    def write(self, folder: Path) -> None:
        """Complete an update of which every file has been written."""
        with _appears(_version_folder(folder, self.version) / MANIFEST) as path:
            path.write_text(self.model_dump_json())


class FolderOutbox:
    """A bucket on this trainer rank's device, whose rounds become files."""

    def __init__(self, folder: Path, num_bytes: int, device: torch.device, *, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._version = 0
        self.written: dict[str, WrittenFile] = {}
        """Files of the present update."""

    def offer(self) -> Offer:
        """Where the updates will be."""
        return {"folder": str(self._folder)}

    def connect(self, offers: Sequence[Offer | None]) -> None:
        """Receivers need nothing but the offer."""

    def opened(self) -> None:
        """Nothing was opened."""

    def begin(self, version: int) -> None:
        """What is posted from now on belongs to this version."""
        self._version, self.written = version, {}

    def bucket(self, round_number: int) -> torch.Tensor:
        """The bytes to fill; those of the round before are in their file."""
        return self._memory

    def post(self, round_number: int, parcels: Sequence[Parcel]) -> None:
        """Write a file, unless it would be empty."""
        if not parcels:
            return
        tensors = {
            str(one.offset): self._memory.narrow(0, one.offset, one.num_bytes).to("cpu", copy=True)
            for one in parcels
        }
        path = _version_folder(self._folder, self._version) / _name(self._rank, round_number)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _appears(path) as partial:
            save_file(tensors, partial)
            num_bytes = partial.stat().st_size
        digests = {name: _digest(tensor) for name, tensor in tensors.items()}
        self.written[path.name] = WrittenFile(num_bytes=num_bytes, sha256=digests)

    def close(self) -> None:
        """Give the memory back; the files stay for engines that have yet to read them."""
        self._memory = torch.empty(0, dtype=torch.uint8)


class FolderInbox:
    """Reads the updates that the trainer ranks write."""

    def __init__(self, offers: Sequence[Offer | None], device: torch.device) -> None:
        offer = offers[0]
        assert offer is not None, "every trainer rank offers the folder"
        self._folder, self._device = Path(offer["folder"]), device
        self._manifest: Manifest | None = None

    def open(self, version: int, *, held: int | None, patience_s: float) -> None:
        """Take up an update once all of its files are there in full.

        Args:
            held: Version of the weights that are here; None: none in full.
            patience_s: How long to wait for files: storage may show them late.

        Raises:
            WeightError: The update is not complete by then, is not the one of this number, or is
                of changes to other weights.
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._manifest = self._complete(version)
                break
            except WeightError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(POLL_S)
        base = self._manifest.base
        if base is not None and base != held:
            self._manifest = None
            raise WeightError(f"Update {version} changes version {base}, but here is {held}.")

    def fetch(self, round_number: int, parcels: Sequence[Parcel]) -> Iterator[torch.Tensor]:
        """The bytes of each parcel, compared with the manifest's digest."""
        for parcel in parcels:
            yield self._read(round_number, parcel).to(self._device)

    def close(self) -> None:
        """Nothing is held open."""
        self._manifest = None

    def is_open(self, version: int) -> bool:
        """Whether an update is the one that was taken up."""
        return self._manifest is not None and self._manifest.version == version

    def _complete(self, version: int) -> Manifest:
        """The manifest of an update whose files have the sizes that it says."""
        folder = _version_folder(self._folder, version)
        try:
            manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
            if manifest.version != version:
                raise WeightError(f"{folder} holds update {manifest.version}, not {version}.")
            for name, file in manifest.files.items():
                if (size := (folder / _checked(name)).stat().st_size) != file.num_bytes:
                    raise WeightError(f"{folder / name} has {size} of {file.num_bytes} bytes.")
        except OSError as error:
            raise WeightError(f"Update {version} is not there: {error}") from None
        except ValidationError as error:
            raise WeightError(f"{folder / MANIFEST} is damaged: {error}") from None
        return manifest

    def _read(self, round_number: int, parcel: Parcel) -> torch.Tensor:
        manifest = self._manifest
        assert manifest is not None, "open an update first"
        name, key = _name(parcel.feeder, round_number), str(parcel.offset)
        path = _version_folder(self._folder, manifest.version) / name
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(key)
            expected = manifest.files[name].sha256[key]
        except (OSError, SafetensorError, KeyError) as error:
            raise WeightError(f"{path} cannot be read: {error}") from None
        if len(tensor) != parcel.num_bytes or _digest(tensor) != expected:
            raise WeightError(f"{path} differs from its checksum.")
        return tensor


def prune(folder: Path, version: int) -> None:
    """Remove all updates but one."""
    for entry in folder.iterdir():
        if re.fullmatch(r"v\d+", entry.name) and entry != _version_folder(folder, version):
            remove_folder(entry)


@contextmanager
def _appears(path: Path) -> Iterator[Path]:
    """Where to write a file that gets its name when it is complete and on the disk."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def _version_folder(folder: Path, version: int) -> Path:
    return folder / f"v{version}"


def _name(rank: int, round_number: int) -> str:
    return f"rank-{rank}-bucket-{round_number}.safetensors"


def _checked(name: str) -> str:
    """A file's name as a manifest gives it, which must not lead anywhere else."""
    if not re.fullmatch(r"rank-\d+-bucket-\d+\.safetensors", name):
        raise WeightError(f"A manifest names a file {name!r}.")
    return name


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().data).hexdigest()
