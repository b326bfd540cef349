"""`megadapo convert`: convert, inspect and compare model folders."""

from __future__ import annotations

import argparse
from pathlib import Path

from megadapo.commands.common import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(commands, "convert", "convert, inspect and compare model folders")
    parser.set_defaults(run=run)
    conversions = parser.add_subparsers(dest="conversion", metavar="CONVERSION", required=True)
    to_megatron = conversions.add_parser(
        "hf-to-megatron",
        help="write a Hugging Face folder in megatron-core's format torch_dist, which loads at any "
        "parallel sizes",
    )
    _add_folders(to_megatron)
    to_hf = conversions.add_parser(
        "megatron-to-hf", help="write a torch_dist folder, or a checkpoint's, as a Hugging Face one"
    )
    _add_folders(to_hf)
    _add_model(to_hf)
    to_hf.add_argument(
        "--quantize", choices=["fp8"], help="quantise with nvidia-modelopt, for vLLM"
    )
    from_gguf = conversions.add_parser(
        "gguf-to-hf", help="write a GGUF file as a Hugging Face folder in fp32 (extra gguf)"
    )
    _add_folders(from_gguf, source="GGUF file to read")
    inspect = conversions.add_parser("inspect", help="print and check a model folder")
    inspect.add_argument("path", type=Path, help="model folder of either kind")
    _add_model(inspect)
    verify = conversions.add_parser("verify", help="compare two model folders bit by bit")
    verify.add_argument("a", type=Path, help="model folder of either kind")
    verify.add_argument("b", type=Path, help="model folder of either kind")
    _add_model(verify)


def run(arguments: argparse.Namespace) -> int:
    from megadapo.models.folder import no_folder
    from megadapo.run.export.export import config_folder
    from megadapo.weights.disk import conversion
    from megadapo.weights.disk.checkpoint_source import TrainerCheckpoint
    from megadapo.weights.disk.export import check_new
    from megadapo.weights.disk.sources import open_layout

    if arguments.conversion != "gguf-to-hf" and vars(arguments).get("source", Path()).is_file():
        raise no_folder("SRC", str(arguments.source))
    if arguments.conversion == "hf-to-megatron":
        print(conversion.hf_to_megatron(arguments.source, arguments.destination))
    elif arguments.conversion == "megatron-to-hf":
        check_new(arguments.destination)
        model = config_folder(arguments.source, arguments.model)
        weights = TrainerCheckpoint(arguments.source, open_layout(model))
        conversion.write_hf(weights, arguments.destination, model, quantize=arguments.quantize)
        print(f"{arguments.destination}: written")
    elif arguments.conversion == "gguf-to-hf":
        print(conversion.gguf_to_hf(arguments.source, arguments.destination))
    elif arguments.conversion == "inspect":
        print(conversion.inspect(arguments.path, config_folder(arguments.path, arguments.model)))
    else:
        folders = arguments.a, arguments.b
        a, b = (config_folder(folder, arguments.model) for folder in folders)
        print(conversion.verify(folders, (a, b)))
    return 0


def _add_folders(parser: argparse.ArgumentParser, source: str = "folder to read") -> None:
    parser.add_argument("source", type=Path, metavar="SRC", help=source)
    parser.add_argument("destination", type=Path, metavar="DST", help="folder to create")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="configuration and tokenizer of a folder without config.json (default: the model.path "
        "of the checkpoint's run)",
    )
