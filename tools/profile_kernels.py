"""Profile a training step or the policy head, or report how every Triton kernel compiles.

python tools/profile_kernels.py                                 the compile report; no GPU needed
python tools/profile_kernels.py --head 1024,512,16384,float32   where the head's time goes
python tools/profile_kernels.py --step configs/quickstart.toml  where a training step's time goes
"""

from __future__ import annotations

import sys

from megadapo.cli import main

if __name__ == "__main__":
    sys.exit(main(["profile", *sys.argv[1:]]))
