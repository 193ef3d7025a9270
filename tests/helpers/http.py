"""A loopback HTTP server of files in memory that can misbehave in the ways real mirrors do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FileServer:
    """Serves ``files``, a path -> bytes; each attribute below it is a fault.

    Attributes:
        files: ``"/mirror/name.gz"`` -> content.
        cuts: Path -> for each request, after how many body bytes to hang up; None, or the list's end: never.
        statuses: Path -> for each request, the HTTP code to answer with; the list's end: a normal answer.
        ranges: Whether to resume.
        announce_length: Whether to send Content-Length.
        delay_s: Seconds to wait before the body.
        requests: What was asked for: ``(path, value of the Range header or None)``.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    cuts: dict[str, list[int | None]] = field(default_factory=dict)
    statuses: dict[str, list[int]] = field(default_factory=dict)
    ranges: bool = True
    announce_length: bool = True
    delay_s: float = 0.0
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path, wanted = handler.path, handler.headers.get("Range")
        self.requests.append((path, wanted))
        if self.statuses.get(path):
            handler.send_error(self.statuses[path].pop(0))
            return
        if path not in self.files:
            handler.send_error(404)
            return
        content, start = self.files[path], 0
        if wanted and self.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                handler.send_response(416)
                handler.send_header("Content-Range", f"bytes */{len(content)}")
                handler.send_header("Content-Length", "0")
                handler.end_headers()
                return
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            handler.send_response(200)
        body = content[start:]
        if self.ranges:
            handler.send_header("Accept-Ranges", "bytes")
        if self.announce_length:
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        time.sleep(self.delay_s)
        cut = self.cuts[path].pop(0) if self.cuts.get(path) else None
        handler.wfile.write(body if cut is None else body[:cut])


@contextmanager
def serve_files() -> Iterator[FileServer]:
    """A running server; ``.url`` is its root, without a slash at the end."""
    state = FileServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self)

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = False  # closing waits for them

    server = Server(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
