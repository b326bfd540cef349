"""The live page of a run, served in this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megadapo.observe.report.live import LiveReport


@contextmanager
def live_page(folder: Path) -> Iterator[str]:
    """Serve the page of a run without steps; yield its address."""
    folder.mkdir()
    with LiveReport(folder, 0, lambda: "running") as server:
        assert server.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
