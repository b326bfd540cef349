"""The options of `megadapo bench head`; the benchmark itself, and torch, come in when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megadapo bench head`."""
    parser.add_argument(
        "--shape",
        action="append",
        metavar="T,H,V,DTYPE",
        help="a shape such as 20480,5120,152064,bfloat16; may be given again",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is")
    parser.add_argument("--threads", type=int, default=2, help="threads on the CPU (default 2)")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds (default 20)")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu counts computing time only: for a busy machine, with --threads 1",
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="rivals whose name has TEXT"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark, print one table a shape, write JSON where asked."""
    from megadapo.bench import head

    return head.run(arguments)
