"""Kills a process of a whole run at a named point, or puts one small fault into a run.

Python imports this file at its start if its folder is in PYTHONPATH. KILL_AT is a folder with an
empty file `module:name` for each point. At the point the file is removed and the process ends,
before the function is called. FAULT is the name of a fault of faults.py, in this folder.
With DAMAGE_UPDATE=N a part of the Nth update of every engine's weights arrives one percent too
small: it samples well, and nothing but log-probs shows it.
"""

import importlib.abc
import importlib.machinery
import os
import signal
import sys
from pathlib import Path


class _Finder(importlib.abc.MetaPathFinder):
    """Replaces functions of modules when these are imported."""

    def __init__(self, wraps):
        """`wraps`: by point `module:name`, a function that returns the replacement."""
        self._wraps = {}
        for point, wrap in wraps.items():
            module, _, name = point.partition(":")
            self._wraps.setdefault(module, []).append((name, wrap))

    def find_spec(self, fullname, path, target=None):
        if fullname not in self._wraps:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        load = spec.loader.exec_module

        def load_and_replace(module):
            load(module)
            for name, wrap in self._wraps[fullname]:
                owner = module
                *classes, function = name.split(".")
                for part in classes:
                    owner = getattr(owner, part)
                setattr(owner, function, wrap(getattr(owner, function)))

        spec.loader.exec_module = load_and_replace
        return spec


def _killing(file):
    """Return a wrap that kills the process at the first call, if the file is still there."""

    def wrap(original):
        def trapped(*args, **options):
            try:
                file.unlink()
            except FileNotFoundError:
                return original(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        return trapped

    return wrap


def _counting_updates(original):
    def start(self, *args, **options):
        self.num_updates = getattr(self, "num_updates", 0) + 1
        original(self, *args, **options)

    return start


def _shrinking_slices(update):
    """Return a wrapper that shrinks slices as they arrive in one update."""

    def wrap(original):
        def arrived(self, copy):
            if self.num_updates == update and "down_proj" in copy.target_name:
                self._region(copy).mul_(0.99)
            original(self, copy)

        return arrived

    return wrap


if "KILL_AT" in os.environ:
    files = Path(os.environ["KILL_AT"]).iterdir()
    sys.meta_path.insert(0, _Finder({file.name: _killing(file) for file in files}))
if "FAULT" in os.environ:
    from faults import FAULTS

    sys.meta_path.insert(0, _Finder(FAULTS[os.environ["FAULT"]]))
if "DAMAGE_UPDATE" in os.environ:
    receiver = "megadapo.weights.sync.receiver:WeightReceiver"
    shrinking = _shrinking_slices(int(os.environ["DAMAGE_UPDATE"]))
    wraps = {f"{receiver}.start": _counting_updates, f"{receiver}._arrived": shrinking}
    sys.meta_path.insert(0, _Finder(wraps))
