"""Serves the report of a run that goes on, on the loopback address.

What it is: `/` is the page, `/data.json` its data. The data is rebuilt on a request after a file of
a run has changed. The page waits ten times as long as that took (5 to 300 s) before it asks again.
The server listens on 127.0.0.1 only, and answers only requests whose Host is 127.0.0.1 or
localhost, with any port. Otherwise a web page could read the data: its own host name can be made to
resolve to 127.0.0.1 (DNS rebinding), and a browser would take both for one site.
To see it from another machine, forward a port: `ssh -L 8765:127.0.0.1:8765 machine`.
What it costs: nothing while no page asks.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from titanlite.runtime.errors import ConfigError
from titanlite.tools.report.page import contents, page
from titanlite.tools.report.run_data import read_runs

HOST = "127.0.0.1"
PORT = 8765
FILES = ("metrics.jsonl", "events.jsonl", "samples.jsonl", "config.toml")
SLOWEST_POLL = 300  # seconds
FASTEST_POLL = 5


class Source:
    """The data of the page, rebuilt when a file of a run has changed."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self._lock = threading.Lock()
        self._state: list[tuple[int, int]] = []
        self._text = ""
        self.poll = FASTEST_POLL

    def text(self) -> str:
        """The data as JSON."""
        with self._lock:
            state = [self._of_file(folder / name) for folder in self.folders for name in FILES]
            if state != self._state:
                started = time.monotonic()
                data = contents(read_runs(self.folders), live=True)
                self._text = json.dumps(data, separators=(",", ":"), allow_nan=False)
                self._state = state
                self.poll = round(
                    min(SLOWEST_POLL, max(FASTEST_POLL, 10 * (time.monotonic() - started)))
                )
            return self._text

    @staticmethod
    def _of_file(path: Path) -> tuple[int, int]:
        try:
            status = path.stat()
        except OSError:
            return 0, 0
        return status.st_size, status.st_mtime_ns


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET of the two paths."""

    source: Source
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        # The port is another one if it was forwarded
        name = self.headers.get("Host", "").partition(":")[0]
        if name not in (HOST, "localhost"):
            self._answer(403, "text/plain", b"this server answers requests for 127.0.0.1 only\n")
        elif self.path.partition("?")[0] == "/":
            self._answer(200, "text/html", page(json.loads(self.source.text())).encode())
        elif self.path.partition("?")[0] == "/data.json":
            self._answer(200, "application/json", self.source.text().encode())
        else:
            self._answer(404, "text/plain", b"not found\n")

    def _answer(self, code: int, kind: str, content: bytes) -> None:
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        unchanged = code == 200 and self.headers.get("If-None-Match") == tag
        self.send_response(304 if unchanged else code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", "0" if unchanged else str(len(content)))
        self.send_header("ETag", tag)
        self.send_header("X-Poll-Seconds", str(self.source.poll))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        if not unchanged:
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Prints nothing: a page that polls would fill the terminal."""


class Server(http.server.ThreadingHTTPServer):
    """A server that prints no traceback if a browser closes its connection."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def build_server(folders: list[Path], port: int) -> Server:
    """A server that listens; port 0 is any free one. Raises ConfigError if the port is in use."""
    handler = type("ReportHandler", (Handler,), {"source": Source(folders)})
    try:
        return Server((HOST, port), handler)
    except OSError as error:
        raise ConfigError(
            f"--port {port}: {error.strerror or error}; expected a free port, or 0 for any"
        ) from None
