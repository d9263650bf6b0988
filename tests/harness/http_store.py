"""A web server on loopback that serves a folder, and fails on purpose."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from vae.shards import store

HANG, CUT = -1, -2  # answers: nothing for a long time; the first half of the bytes


class HttpStore:
    """`answers` by file name: a status, HANG or CUT for each of the next requests; the last one stays."""

    def __init__(self, root: Path, port: int = 0) -> None:
        self.root = root
        self.answers: dict[str, list[int]] = {}
        self.fails_every = 0  # of so many requests, one is answered with 503
        self.requests: list[str] = []  # path with query
        self.authorizations: set[str] = set()
        self.sent: Counter[str] = Counter()  # bytes by file name
        self.released = threading.Event()  # ends HANG
        self._server: ThreadingHTTPServer | None = None
        self.port = port
        self.start()

    def start(self) -> None:
        """Serve, on the same port as before."""
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def url(self, name: str = "dataset.json", login: str = "") -> str:
        """The address of a file."""
        return f"http://{login}127.0.0.1:{self.port}/{name}"

    def answer(self, name: str) -> int:
        """The next answer for a file."""
        planned = self.answers.get(name, [200])
        return planned.pop(0) if len(planned) > 1 else planned[0]

    def wholes(self, suffix: str = ".tar") -> list[str]:
        """Names of the files that were asked for."""
        names = (urlsplit(path).path.rpartition("/")[2] for path in self.requests)
        return [name for name in names if name.endswith(suffix)]


class _Handler(BaseHTTPRequestHandler):
    store: HttpStore

    def do_GET(self) -> None:
        name = urlsplit(self.path).path.lstrip("/")
        self.store.requests.append(self.path)
        self.store.authorizations.add(self.headers.get("Authorization", ""))
        answer, file = self.store.answer(name), self.store.root / name
        if answer == HANG:
            self.store.released.wait(60)
            return
        if self.store.fails_every and len(self.store.requests) % self.store.fails_every == 0:
            answer = 503
        if answer == 200 and not file.is_file():
            answer = 404
        if answer >= 400:
            self.send_error(answer)
            return
        self._send(name, file.read_bytes(), answer == CUT)

    def _send(self, name: str, data: bytes, cut: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if cut:
            data = data[: len(data) // 2]
        self.wfile.write(data)
        self.store.sent[name] += len(data)

    def log_message(self, *_args: object) -> None:
        """Print nothing."""


@contextmanager
def http_store(root: Path) -> Iterator[HttpStore]:
    """A server for a folder, which ends with the context."""
    server = HttpStore(root)
    try:
        yield server
    finally:
        server.released.set()
        server.stop()


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of a fraction of a second."""
    monkeypatch.setattr(store, "PAUSES", (0.05, 0.1))
    monkeypatch.setattr(store, "PAUSES_REFUSED", (0.01, 0.02))
