"""An HTTP server on loopback whose replies a test decides."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, object] | bytes
"""A status and a JSON body, or bytes after which the connection is closed."""


class FakeServer(ThreadingHTTPServer):
    """A server that records each request: its path, its key and its body."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.seen: list[tuple[str, str | None, dict[str, Any]]] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}).start()

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> Reply:
        raise NotImplementedError


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers["Authorization"], body))
        reply = self.server.answer(self.path, body)
        if isinstance(reply, bytes):
            self.wfile.write(reply)
            return
        self.send_response(reply[0])
        self.end_headers()
        self.wfile.write(json.dumps(reply[1]).encode())

    def log_message(self, *_: object) -> None:
        """Suppress the access log."""
