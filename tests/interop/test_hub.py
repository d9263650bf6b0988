"""Downloads from and uploads to the Hugging Face hub, against a stand-in for its server."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.harness.runs import run_here
from tests.harness.small_vae import SMALL, write_vae
from vae.interop import hub
from vae.interop.vae_files import load_vae
from vae.system.errors import UserError

constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
HfApi = pytest.importorskip("huggingface_hub").HfApi
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A server that serves the folders of `root` as repositories, and what HfApi writes into them."""

    def __init__(self, root: Path):
        self.root, self.refused, self.requests = root, {}, []
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.private: list[bool] = []  # of each repository that was created
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def create_repo(self, _api: object, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        """Stand-in for a method of HfApi, as the next two."""
        assert exist_ok
        self.private.append(private)
        return f"{self.url}/{repo_id}"

    def file_exists(self, _api: object, repo_id: str, filename: str) -> bool:
        return (self.root / repo_id / filename).exists()

    def create_commit(self, _api: object, repo_id: str, operations: list, *, commit_message: str) -> None:
        assert commit_message
        if self.refused:
            raise ValueError("license must be one of\n[apache-2.0, mit]")
        (self.root / repo_id).mkdir(parents=True, exist_ok=True)
        for operation in operations:
            with operation.as_file() as file:
                (self.root / repo_id / operation.path_in_repo).write_bytes(file.read())


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
    for name in ("create_repo", "file_exists", "create_commit"):
        method = getattr(server, name)
        monkeypatch.setattr(HfApi, name, lambda *given, method=method, **options: method(*given, **options))
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


def test_upload_and_download_give_the_same_vae(server, tmp_path):
    run = tmp_path / "run"
    write_vae(run / "vae", seed=3)
    records = [
        {"kind": "baseline", "step": 0, "codec": "bicubic", "image_size": 64, "psnr": 26.5, "images": 2},
        {"kind": "validation", "step": 5, "image_size": 64, "psnr": 20.0, "ssim": 0.5, "images": 2},
        {"kind": "validation", "step": 9, "image_size": 64, "psnr": 31.25, "ssim": 0.9, "images": 2},
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    settings = {"image_size": 64, "kl_weight": 1e-6, "data_path": "/home/me", "init_from": "someone/pipeline"}
    (run / "config.json").write_text(json.dumps(settings))
    (run / "samples").mkdir()
    for step in (5, 9):
        (run / "samples" / f"samples_step_{step:07}.png").write_bytes(b"png%d" % step)
    words = (run / "vae", "--output", tmp_path / "out", "--push_to", "someone/mine", "--license", "cc0-1.0")
    done = export(*words)
    assert done.returncode == 0, done.stderr
    assert "uploaded: diffusion_pytorch_model.safetensors, config.json, README.md, samples.png" in done.stdout
    assert server.private == [True]

    repo = server.root / "someone" / "mine"
    assert (repo / "samples.png").read_bytes() == b"png9"
    card = (repo / "README.md").read_text()
    header, body = card.split("---\n")[1:]
    assert "license: cc0-1.0\n" in header
    assert "library_name: diffusers\n" in header
    assert "base_model: someone/pipeline\n" in header
    assert "| VAE | 31.25 dB | 0.9000 |" in body
    assert "| bicubic | 26.50 dB |  |" in body
    assert "/home/me" not in card
    with safe_open(repo / "diffusion_pytorch_model.safetensors", "pt") as file:
        assert file.metadata()["modelspec.license"] == "cc0-1.0"
    loaded, own = load_vae(Path("someone/mine")), load_vae(run / "vae")
    for key, value in own.autoencoder.state_dict().items():
        assert value.equal(loaded.autoencoder.state_dict()[key]), key

    (run / "config.json").unlink()
    assert "uploaded" in export(*words, "--overwrite").stdout  # the card does without the facts of the run

    (repo / "README.md").write_text("written by hand")
    assert "its README.md is kept" in export(*words, "--overwrite").stdout
    assert (repo / "README.md").read_text() == "written by hand"


def test_refused_upload_keeps_the_files_and_says_how_to_go_on(server, tmp_path):
    server.refused["someone/mine"] = (403, "")
    vae = write_vae(tmp_path / "mine")
    done = export(vae, "--output", tmp_path / "out", "--push_to", "someone/mine", "--license", "nothing")
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert "license must be one of [apache-2.0, mit]" in done.stderr
    assert f"is complete; then run: hf upload someone/mine {tmp_path / 'out'}" in done.stderr
    assert load_vae(tmp_path / "out").autoencoder.config == SMALL
