"""Convert, inspect and compare model folders: the same as `megadapo convert`.

python tools/convert_checkpoint.py hf-to-megatron SRC DST --tp 2 --pp 2
python tools/convert_checkpoint.py megatron-to-hf SRC DST
python tools/convert_checkpoint.py inspect PATH
python tools/convert_checkpoint.py verify A B
"""

from __future__ import annotations

import sys

from megadapo.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
