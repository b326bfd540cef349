"""Write a Hugging Face folder, tensor by tensor."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError
from safetensors.torch import save_file

from megadapo.cluster.this_node import pid_namespace
from megadapo.cluster.watch.guard import start_time
from megadapo.errors import InfraError, WeightError
from megadapo.models.folder import read_json
from megadapo.observe.tables import new_console
from megadapo.weights.disk.files import CARRIED, files_within, remove_folder, sync_path
from megadapo.weights.disk.headers import INDEX_NAME, WHOLE_NAME
from megadapo.weights.disk.sources import TensorSource
from megadapo.weights.layout.layout import ModelLayout

PARTIAL = ".partial"
"""Part of the name of a folder that is still being written."""


def export_weights(
    tensors: Iterable[tuple[str, torch.Tensor]],
    folder: Path | str,
    *,
    dtype: torch.dtype,
    base_folder: Path | str,
    max_file_bytes: int = 2 << 30,
    on_tensor: Callable[[], None] = lambda: None,
) -> None:
    """Write full tensors as a Hugging Face folder that transformers and vLLM load.

    Memory: one output file and one tensor.

    Args:
        tensors: Full tensors by Hugging Face name, each exactly once, in any order. They must not
            change until their file is written.
        folder: Folder to write; must not exist, or be empty.
        base_folder: Model folder to copy configuration and tokenizer from.
        on_tensor: Called after each tensor.
    """
    with new_folder(folder) as partial:
        copy_config_and_tokenizer(base_folder, partial, dtype)
        pending: dict[str, torch.Tensor] = {}
        names_of_files: list[list[str]] = []
        total_bytes = 0

        def write_file() -> None:
            names_of_files.append(sorted(pending))
            path = partial / f"part-{len(names_of_files):05d}"
            save_file(pending, path, metadata={"format": "pt"})
            # safetensors makes files private to the user, but another user may serve the model
            path.chmod((partial / "config.json").stat().st_mode)
            pending.clear()

        for name, tensor in tensors:
            size = sum(one.nbytes for one in pending.values())
            if pending and size + tensor.nbytes > max_file_bytes:
                write_file()
            pending[name] = tensor.detach().cpu().contiguous()
            total_bytes += tensor.nbytes
            on_tensor()
        write_file()
        _name_files(partial, names_of_files, total_bytes)


def _name_files(folder: Path, names_of_files: list[list[str]], total_bytes: int) -> None:
    """Give the files their names, now that their number is known; list several in an index."""
    weight_map: dict[str, str] = {}
    total = len(names_of_files)
    for number, names in enumerate(names_of_files, start=1):
        file = f"model-{number:05d}-of-{total:05d}.safetensors" if total > 1 else WHOLE_NAME
        (folder / f"part-{number:05d}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if total > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def check_new(folder: Path) -> None:
    """Raise WeightError if the folder to write exists and is not empty."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise WeightError(f"{folder} exists already; name a new folder.")


@contextmanager
def new_folder(folder: Path | str) -> Iterator[Path]:
    """Yield an empty folder to write, which gets the name `folder` when it is complete.

    By then all its files are on the disk. Unfinished folders are removed: this one by an error, and
    those of killed commands of this machine. Raise WeightError if `folder` exists and is not empty,
    or if another command writes it.
    """
    folder = Path(folder)
    check_new(folder)
    partial = _own_partial(folder)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            yield partial
            for path in (partial, *partial.rglob("*")):
                sync_path(path)
            # a command on another machine may have been faster
            check_new(folder)
            partial.rename(folder)
            sync_path(folder.parent)
        except (OSError, SafetensorError) as error:
            raise InfraError(
                f"{folder} cannot be written: {error}; make room there or name another folder, "
                "and repeat the command"
            ) from error
        stack.pop_all()


def _own_partial(folder: Path) -> Path:
    """Return this process's partial folder, and remove those of dead processes of this machine."""
    digest = hashlib.sha256(pid_namespace().encode()).hexdigest()
    start = f"{folder.name}{PARTIAL}-{digest[:8]}-"
    for other in folder.parent.glob(f"{glob.escape(start)}*"):
        pid = other.name.removeprefix(start)
        if pid.isdecimal() and int(pid) != os.getpid() and start_time(int(pid)) is not None:
            raise WeightError(f"{folder} is being written by process {pid}; name another folder.")
        remove_folder(other)
    return folder.with_name(f"{start}{os.getpid()}")


def copy_config_and_tokenizer(
    base_folder: Path | str, folder: Path, dtype: torch.dtype
) -> list[str]:
    """Copy the files of `CARRIED`, set the weights' type in the configuration; return the names."""
    names = []
    for path in files_within(Path(base_folder), CARRIED):
        name = str(path.relative_to(base_folder))
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
        names.append(name)
    config = read_json(folder / "config.json")
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    plain = config | {key: str(dtype).removeprefix("torch.")}
    # the weights beside it are plain, also if those of the base model are not
    plain.pop("quantization_config", None)
    if plain != config:
        text = json.dumps(plain, indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
    return names


def full_tensors(source: TensorSource, layout: ModelLayout) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the full tensors of a source in the order of the model."""
    for name, shape in layout.hf_shapes.items():
        yield name, source.read(name, 0, 0, shape[0])


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr if that is a terminal; yield the function that advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=new_console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
