"""The kernels' tests again, with Triton kernels run by Triton's interpreter.

The interpreter is chosen when a kernel is defined, hence a process of its own. It is slow, so only
some tests run: each branch of each kernel at its smallest size. None on bf16 gradients, as it cuts
off bits where a GPU rounds.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHOSEN = {
    # row passes: several tiles in a row, several blocks of rows, options, padding, nothing to do
    "policy_head/test_head.py": (
        "matches_fp64 and 1-random or 151669 and negative or every_option and k1-0.7"
        " or padded or whole_shards or no_token or dropped and nan-importance"
        " or non_finite_hidden or first_ratio and bf16 or gradient_of_any_objective or beside"
    ),
    # how the row pass hands over what test_terms.py shows of each gate
    "policy_head/test_edges.py": "compiled and infinity and (sequence-weight or entropy)",
    "policy_head/test_terms.py": "test_terms",
}


@pytest.mark.slow
def test_interpreted_kernels_pass_the_same_tests():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    chosen = " or ".join(f"({Path(file).name} and ({some}))" for file, some in CHOSEN.items())
    files = [str(HERE / file) for file in CHOSEN]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", chosen, *files]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
