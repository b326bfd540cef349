"""The kernels' tests again, with Triton kernels run by Triton's interpreter.

The interpreter is chosen when a kernel is defined, hence a process of its own. It is slow, so only
some tests run; none on bf16 gradients, as it cuts off bits where a GPU rounds.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHOSEN = {
    "policy_head/test_head.py": (
        "matches_fp64 and (63 or 1-) or every_option and (k1-0.7 or k2-1.3 or k3-1.3)"
        " or padded or whole_shards or no_token or dropped and nan-importance"
        " or non_finite_hidden or first_ratio and bf16 or gradient_of_any_objective or beside"
    ),
    "policy_head/test_edges.py": "compiled and infinity and (sequence or weight or entropy)",
    "policy_head/test_terms.py": "",
    # rows are programs of their own, but in RMSNorm's backward pass, which shares out 300
    "test_elementwise.py": "not bf16_grads and not torch and (not 300 or rmsnorm and 300-63)",
}


@pytest.mark.slow
@pytest.mark.parametrize("file", list(CHOSEN))
def test_interpreted_kernels_pass_the_same_tests(file):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", CHOSEN[file], str(HERE / file)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
