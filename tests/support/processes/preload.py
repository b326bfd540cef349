"""Loads what every trainer process of the tests needs, before they are forked."""

from megadapo.trainer.model.cpu_platform import install_cpu_platform

NUM_THREADS = 1

install_cpu_platform()
import megadapo.trainer.rank  # noqa: E402, F401 - the platform comes first
