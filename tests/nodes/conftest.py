"""Two machines with a core each for Ray, and the run that tests let them do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.machines import Network, why_not


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say once for all tests of this folder why they cannot run, if they cannot."""
    own = [item for item in items if item.path.parent == Path(__file__).parent]
    reason = why_not() if own else ""
    for item in own:
        item.add_marker(pytest.mark.full)
        item.add_marker(pytest.mark.timeout(1500))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def lan(shared: Path) -> Iterator[Network]:
    made = Network()
    try:
        head, other = (made.boot(number, [shared]) for number in (1, 2))
        for machine in (head, other):
            machine.start_ray(head, num_cpus=1)
        yield made
    finally:
        made.close()
