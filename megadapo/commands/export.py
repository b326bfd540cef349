"""`megadapo export`: write a checkpoint as a folder that vLLM and transformers load."""

from __future__ import annotations

import argparse
from pathlib import Path

from megadapo.commands.common import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(
        commands, "export", "write a checkpoint as a Hugging Face folder; needs no GPU"
    )
    parser.add_argument(
        "source", type=Path, metavar="RUN|CHECKPOINT", help="a run's folder, or one checkpoint"
    )
    parser.add_argument("destination", type=Path, metavar="DST", help="folder to create")
    parser.add_argument(
        "--step", type=int, metavar="N", help="checkpoint of the run (default: newest complete one)"
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="trained model, for its configuration and tokenizer (default: the run's model.path)",
    )
    parser.add_argument(
        "--quantize", choices=["fp8"], help="quantise with nvidia-modelopt, for vLLM"
    )
    parser.add_argument(
        "--critic", action="store_true", help="export the critic instead of the policy"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.filesize import decimal

    from megadapo.run.export.export import export_checkpoint, find_source
    from megadapo.weights.disk.export import check_new

    check_new(arguments.destination)
    with Console(stderr=True).status("comparing the checkpoint with its SHA-256"):
        source = find_source(arguments.source, arguments.step)
    folder = arguments.destination
    export_checkpoint(
        source, folder, model=arguments.model, quantize=arguments.quantize, critic=arguments.critic
    )
    kind = source.kind(critic=arguments.critic)
    loader = "CausalLM" if kind == "policy" else "SequenceClassification"
    options = {"policy": "", "reward model": " --runner pooling"}
    serve = f"  vllm serve {folder}{options[kind]}\n" if kind in options else ""
    size = decimal(sum(path.stat().st_size for path in folder.iterdir()))
    num_files = len(list(folder.glob("*.safetensors")))
    files = "file" if num_files == 1 else "files"
    print(
        f"step {source.checkpoint.step}: {size} in {num_files} weight {files}, {folder}\n{serve}"
        f'  transformers.AutoModelFor{loader}.from_pretrained("{folder}", dtype="auto")'
    )
    return 0
