"""The program's signal handlers while Ray starts."""

import signal
import sys

import pytest

from megadapo.cluster.ray_connection import _own_sigterm_handler


def test_stop_signal_while_ray_starts_reaches_the_program():
    """With Ray's handler alone the run counts as failed, not as stopped."""
    received = []

    def own(number, frame):
        received.append(number)

    before = signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(SystemExit), _own_sigterm_handler():
            # as ray.init does
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
            signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
