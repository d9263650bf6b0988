"""Downloads from the Hugging Face hub, against a stand-in for its server."""

import hashlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.harness.runs import run_here
from tests.harness.small_vae import write_vae
from vae.interop import hub
from vae.interop.vae_files import load_vae
from vae.system.errors import UserError

constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A server that serves the folders of `root` as repositories."""

    def __init__(self, root: Path):
        self.root, self.refused, self.requests = root, {}, []
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._file(with_body=False)

    def do_GET(self) -> None:
        self._file(with_body=True)

    def _file(self, with_body: bool) -> None:
        self.hub.requests.append(self.path)
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/main/(.+)", self.path)
        if match is None:  # what the package asks about itself
            self.send_error(404)
            return
        repo, name = match.groups()
        file = self.hub.root / repo / name
        status, code = self.hub.refused.get(repo, (200, ""))
        if status == 200 and not file.is_file():
            status, code = 404, "EntryNotFound" if (self.hub.root / repo).is_dir() else "RepoNotFound"
        data = file.read_bytes() if status == 200 else b""
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *_args: object) -> None:
        """Print nothing."""


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[Hub]:
    """A hub with one repository, someone/pipeline, that contains a VAE in vae/."""
    write_vae(tmp_path / "hub" / "someone" / "pipeline" / "vae", seed=1)
    server = Hub(tmp_path / "hub")
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants._HF_DEFAULT_ENDPOINT)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    monkeypatch.chdir(tmp_path)
    hub.download.cache_clear()
    yield server
    server.server.shutdown()
    hub.download.cache_clear()


def test_pipeline_subfolder_and_file_of_a_repository_are_the_same_vae(server):
    expected = load_vae(server.root / "someone" / "pipeline" / "vae")
    repo = server.root / "someone" / "pipeline"
    assert export(repo / "vae", "--output", repo / "one.safetensors").returncode == 0
    for name in ("someone/pipeline", "someone/pipeline:vae", "someone/pipeline:one.safetensors"):
        loaded = load_vae(Path(name))
        for key, value in expected.autoencoder.state_dict().items():
            assert value.equal(loaded.autoencoder.state_dict()[key]), (name, key)
    assert load_vae(Path("someone/pipeline:vae")).scaling_factor == 0.5


def test_folder_on_this_machine_wins_and_the_hub_is_not_asked(server, tmp_path):
    own = load_vae(write_vae(tmp_path / "someone" / "pipeline", seed=2)).autoencoder.state_dict()
    loaded = load_vae(Path("someone/pipeline")).autoencoder.state_dict()
    assert all(value.equal(loaded[key]) for key, value in own.items())
    with pytest.raises(UserError, match=r"--vae someone.pipelin: there is no such file or folder$"):
        load_vae(Path("someone/pipelin"))
    assert server.requests == []


@pytest.mark.parametrize(
    ("refused", "name", "said"),
    [
        (None, "someone/nothing", "and the hub has no such public repository"),
        (None, "someone/pipeline:unet", "the repository has no unet/diffusion_pytorch_model.safetensors"),
        (None, "someone/pipeline:x.safetensors", "the repository has no such file: correct the path in it"),
        ((401, "GatedRepo"), "someone/pipeline", "the repository is gated: accept its terms on its page"),
        ((401, ""), "someone/pipeline", "and the hub refuses access ("),
        ((403, ""), "someone/pipeline", "and the hub refuses access (403 Forbidden"),
        ((404, "RevisionNotFound"), "someone/pipeline", "has no such revision"),
    ],
)
def test_refusals_are_one_line(server, refused, name, said):
    if refused:
        server.refused["someone/pipeline"] = refused
    with pytest.raises(UserError, match=re.escape(said)) as error:
        load_vae(Path(name), flag="--init_from")
    assert str(error.value).startswith(f"--init_from {name}: ")
    assert "\n" not in str(error.value)


def test_offline_uses_the_cache_and_says_what_it_lacks(server, monkeypatch):
    load_vae(Path("someone/pipeline"))
    hub.download.cache_clear()
    asked = len(server.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_vae(Path("someone/pipeline")).scaling_factor == 0.5
    with pytest.raises(
        UserError, match=r"--vae someone/other: .* not in the cache of the hub: unset HF_HUB_OFFLINE"
    ):
        load_vae(Path("someone/other"))
    assert len(server.requests) == asked


@pytest.mark.slow  # the package asks again for 20 s
def test_without_a_network_the_message_says_so(server):
    server.server.shutdown()
    server.server.server_close()
    with pytest.raises(
        UserError, match=r"^--vae someone/pipeline: .* the hub cannot be reached \(.+\): check"
    ):
        load_vae(Path("someone/pipeline"))


def test_without_the_package_the_message_names_it_and_the_download(server, monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(
        UserError, match=r"pip install huggingface_hub, or .* hf download someone/pipeline --"
    ):
        load_vae(Path("someone/pipeline"))


def export(*words: object):
    return run_here("export_vae.py", "--vae", *words)
