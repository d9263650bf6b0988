"""A stand-in for the Hugging Face hub on loopback: files of models, and what HfFileSystem asks for."""

import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import duckdb
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_PATH = re.compile(
    r"/(?:(?:api/)?datasets/|(?!api/))([^/]+/[^/]+)(?:/(revision|tree|paths-info|resolve)/([^/]+)/?(.*))?"
)


def write_parquet(path: Path, images: list[bytes], labels: list[int], names: list[str]) -> None:
    """As `datasets` writes images with a ClassLabel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    db = duckdb.connect()
    db.execute("CREATE TABLE t (image STRUCT(bytes BLOB, path VARCHAR), label BIGINT)")
    for number, (data, label) in enumerate(zip(images, labels, strict=True)):
        db.execute("INSERT INTO t VALUES ({'bytes': ?::BLOB, 'path': ?}, ?)", [data, f"{number}.jpg", label])
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    note = json.dumps({"info": {"features": features}}).replace("'", "''")
    db.execute(f"COPY t TO '{path}' (FORMAT parquet, KV_METADATA {{huggingface: '{note}'}})")


class DatasetHub:
    """Serves the folders ROOT/REVISION/OWNER/NAME, those in `private` with a token, and none in `refused`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.private: set[str] = set()
        self.refused: dict[str, tuple[int, str]] = {}  # status and error code
        self.requests: list[str] = []  # method and path
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@contextmanager
def dataset_hub(root: Path, patch: pytest.MonkeyPatch) -> Iterator[DatasetHub]:
    """A hub as long as the context lasts, which huggingface_hub asks without a token."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    hub = DatasetHub(root)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants._HF_DEFAULT_ENDPOINT)
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_TOKEN_PATH", str(root / "no token"))
    patch.delenv("HF_TOKEN", raising=False)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: DatasetHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        match = _PATH.fullmatch(urlsplit(self.path).path)
        if match is None:
            self._send(404)
            return
        repo, action, revision, name = (unquote(text or "") for text in match.groups())
        folder = self.hub.root / (revision or "main") / repo
        if repo in self.hub.refused:
            status, code = self.hub.refused[repo]
            self._send(status, code=code)
            return
        if not (self.hub.root / "main" / repo).is_dir() or self._is_refused(repo):
            self._send(401, code="RepoNotFound")  # the hub does not say which of the two it is
        elif not folder.is_dir():
            self._send(404, code="RevisionNotFound")
        elif action == "resolve":
            file = folder / name
            self._send(200, file.read_bytes()) if file.is_file() else self._send(404, code="EntryNotFound")
        elif action == "tree":
            self._send_json([_entry(folder, path) for path in sorted((folder / name).rglob("*"))])
        elif action == "paths-info":
            paths = [folder / path for path in json.loads(body)["paths"]]
            self._send_json([_entry(folder, path) for path in paths if path.exists()])
        else:
            self._send_json({"id": repo, "sha": COMMIT})

    def _is_refused(self, repo: str) -> bool:
        return repo in self.hub.private and self.headers.get("Authorization") != "Bearer hf_right"

    def _send_json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), kind="application/json")

    def _send(self, status: int, data: bytes = b"", code: str = "", kind: str = "text/plain") -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_args: object) -> None:
        """Print nothing."""


def _entry(folder: Path, path: Path) -> dict[str, object]:
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0", "size": 0}
    return {
        "type": "file",
        "path": name,
        "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
        "size": path.stat().st_size,
    }


if __name__ == "__main__":  # HF_ENDPOINT for a trial by hand
    print(DatasetHub(Path(sys.argv[1])).url, flush=True)
    threading.Event().wait()
