"""Profile a training step or the policy head, or report how every Triton kernel compiles.

python tools/profile_kernels.py                                 the compile report; no GPU needed
python tools/profile_kernels.py --head 1024,512,16384,float32   where the head's time goes
python tools/profile_kernels.py --step configs/quickstart.toml  where a training step's time goes
"""

from __future__ import annotations

import argparse
import sys

from megadapo.errors import MegadapoError
from megadapo.observe.kernel_profile import add_arguments, main

if __name__ == "__main__":
    _parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(_parser)
    _arguments, _rest = _parser.parse_known_args()
    _arguments.overrides = _rest
    try:
        raise SystemExit(main(_arguments))
    except MegadapoError as error:
        print(f"profile_kernels: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
