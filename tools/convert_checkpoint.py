"""Convert, inspect and compare model folders: `megadapo convert` for a checkout without install.

python tools/convert_checkpoint.py hf-to-megatron SRC DST --tp 2 --pp 2
python tools/convert_checkpoint.py megatron-to-hf SRC DST
python tools/convert_checkpoint.py inspect PATH
python tools/convert_checkpoint.py verify A B
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megadapo.errors import MegadapoError  # noqa: E402
from megadapo.weights import convert  # noqa: E402


def main() -> int:
    """Run one conversion; an error is one message and its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    convert.add_arguments(parser)
    try:
        return convert.run(parser.parse_args())
    except MegadapoError as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
