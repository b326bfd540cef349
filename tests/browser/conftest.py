"""One browser for the tests of a module."""

from collections.abc import Iterator

import pytest

from tests.support.processes.chromium import Page, chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("chromium")) as page:
        page.resize(1280, 900)
        yield page
