"""A run that is stopped in any way and phase ends as documented and resumes to the same numbers."""

import subprocess
import sys

import pytest

from tests.support import REPOSITORY
from tests.support.runs.whole_runs import NUM_STEPS

pytestmark = pytest.mark.fault

CELLS = (
    "signal=TERM,target=group,phase=rollout",
    "signal=HUP,target=group,phase=publication",
    "signal=INT,target=session,phase=update",
    "signal=TERM,target=driver,phase=save",
    "signal=INT,target=group,phase=evaluation",
    "signal=control service,phase=rollout",
)


def stop(folder, *cells, num_steps):
    words = [word for cell in cells for word in ("--only", f"{cell},twice=False")]
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tools" / "faults" / "stops.py", folder, *words]
        + ["--num-steps", str(num_steps)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(900)
def test_stops_lose_no_completed_step(uninterrupted, tmp_path):
    """A signal to the driver's group must not reach Ray, and a lost service costs no step."""
    (tmp_path / "undisturbed").symlink_to(uninterrupted)
    stop(tmp_path, *CELLS, num_steps=NUM_STEPS)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("cells", ["signal=TERM,target=group", "signal=control service"])
def test_stop_in_each_phase_loses_no_completed_step(tmp_path, cells):
    stop(tmp_path, cells, num_steps=40)
