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
        "hf-to-megatron", help="split a Hugging Face folder into one shard file per trainer rank"
    )
    _add_folders(to_megatron)
    for name, what in (
        ("tp", "tensor-parallel"),
        ("pp", "pipeline-parallel"),
        ("vpp", "virtual pipeline"),
        ("ep", "expert-parallel"),
    ):
        to_megatron.add_argument(f"--{name}", type=int, default=1, help=f"{what} size")
    to_hf = conversions.add_parser(
        "megatron-to-hf", help="merge shard files into a Hugging Face folder"
    )
    _add_folders(to_hf)
    to_hf.add_argument(
        "--quantize", choices=["fp8"], help="quantise with nvidia-modelopt, for vLLM"
    )
    from_gguf = conversions.add_parser(
        "gguf-to-hf", help="write a GGUF file as a Hugging Face folder in fp32 (extra gguf)"
    )
    _add_folders(from_gguf, source="GGUF file to read")
    inspect = conversions.add_parser("inspect", help="print and check a model folder")
    inspect.add_argument("path", type=Path, help="model folder of either kind")
    verify = conversions.add_parser("verify", help="compare two model folders bit by bit")
    verify.add_argument("a", type=Path, help="model folder of either kind")
    verify.add_argument("b", type=Path, help="model folder of either kind")


def run(arguments: argparse.Namespace) -> int:
    from megadapo.models.folder import no_folder
    from megadapo.weights.disk import conversion

    if arguments.conversion != "gguf-to-hf" and vars(arguments).get("source", Path()).is_file():
        raise no_folder("SRC", str(arguments.source))
    if arguments.conversion == "hf-to-megatron":
        conversion.hf_to_megatron(
            arguments.source,
            arguments.destination,
            tp_size=arguments.tp,
            pp_size=arguments.pp,
            vpp_size=arguments.vpp,
            ep_size=arguments.ep,
        )
        print(conversion.inspect(arguments.destination))
    elif arguments.conversion == "megatron-to-hf":
        conversion.megatron_to_hf(
            arguments.source, arguments.destination, quantize=arguments.quantize
        )
        print(f"{arguments.destination}: written")
    elif arguments.conversion == "gguf-to-hf":
        from megadapo.weights.disk.gguf import gguf_to_hf

        gguf_to_hf(arguments.source, arguments.destination)
        print(conversion.inspect(arguments.destination))
    elif arguments.conversion == "inspect":
        print(conversion.inspect(arguments.path))
    else:
        print(conversion.verify(arguments.a, arguments.b))
    return 0


def _add_folders(parser: argparse.ArgumentParser, source: str = "folder to read") -> None:
    parser.add_argument("source", type=Path, metavar="SRC", help=source)
    parser.add_argument("destination", type=Path, metavar="DST", help="folder to create")
