"""Fixtures of the kernel tests: NaN in uninitialised memory, and the CPU's implementations."""

from collections.abc import Callable, Iterator

import pytest
import torch

from megadapo.kernels.cpu import native
from megadapo.kernels.cpu.layers import SOURCE


@pytest.fixture(autouse=True)
def nan_filled_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Set torch's number of threads for the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def fresh_native() -> Iterator[None]:
    """Forget loaded C code before and after the test."""
    native.load_native.cache_clear()
    yield
    native.load_native.cache_clear()


@pytest.fixture(params=["compiled", "torch"])
def passes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fresh_native: None
) -> None:
    """Select one implementation on the CPU; under the interpreter Triton's runs instead of both."""
    monkeypatch.setenv(native.SWITCH, "1" if request.param == "compiled" else "0")
    assert (native.load_native(SOURCE) is not None) == (request.param == "compiled")
