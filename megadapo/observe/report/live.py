"""The live report: the page of one run on loopback, which reads the run again while it works."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megadapo.errors import DataError
from megadapo.observe.metrics.records import EVALUATIONS_FILE, METRICS_FILE
from megadapo.observe.report.page import as_html, contents, read_run, script_json
from megadapo.observe.report.responses import SavedResponses, read_responses
from megadapo.observe.rollouts.files import HELD_OUT_FOLDER, ROLLOUTS_FOLDER

DEFAULT_PORT = 3276
_WATCHED = (METRICS_FILE, EVALUATIONS_FILE, ROLLOUTS_FOLDER, HELD_OUT_FOLDER)
# The name of a foreign page may stand for this address too. A tunnel may have another port.
_HOSTS = re.compile(r"(localhost|127\.0\.0\.1)(:\d+)?")


class LiveReport(ThreadingHTTPServer):
    """A server of one run's page, and of the page's contents as JSON."""

    def __init__(self, folder: Path, port: int, state: Callable[[], str]) -> None:
        """Listen on loopback; `state` returns the run's state."""
        self._folder, self._state = folder, state
        self._lock = threading.Lock()
        self._saved: SavedResponses | None = None
        super().__init__(("127.0.0.1", port), _Request)

    def contents(self, known: str | None) -> dict[str, object] | None:
        """Return the page's contents; None if `known` stands for the present files."""
        with self._lock:
            state = self._state()
            paths = (self._folder / name for name in _WATCHED)
            stats = [path.stat() for path in paths if path.exists()]
            version = "-".join([state, *(f"{one.st_mtime_ns}.{one.st_size}" for one in stats)])
            if version == known:
                return None
            run = read_run(self._folder, self._folder.resolve().name, state=state)
            # after an error, all groups are read again
            saved, self._saved = self._saved, None
            self._saved = read_responses([self._folder], known=saved)
            return contents([run], self._saved, live=version)


class _Request(BaseHTTPRequestHandler):
    """A request for the page or its contents; no other is answered."""

    server: LiveReport

    def do_GET(self) -> None:
        status, kind, text = self._answer()
        # the browser may have left
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(text.encode())

    def _answer(self) -> tuple[int, str, str]:
        """Return status, kind and text."""
        if _HOSTS.fullmatch(self.headers.get("Host", "")) is None:
            return 403, "text/plain", "only localhost is answered"
        if self.path not in ("/", "/data.json"):
            return 404, "text/plain", "nothing is here"
        try:
            found = self.server.contents(self.headers.get("If-None-Match"))
        except (DataError, OSError) as error:
            return 503, "text/plain", str(error)
        if found is None:
            return 304, "text/plain", ""
        if self.path == "/":
            return 200, "text/html", as_html(found, live=True)
        return 200, "application/json", script_json(found)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print no line for each request."""
