"""The weights of LPIPS: their sources, and one clear error for each failure; with real files and servers."""

import functools
import hashlib
import http.server
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vae.config.options import LossConfig
from vae.losses import trunk_weights
from vae.losses.perceptual import build, build_perceptual
from vae.losses.trunk_weights import URLS, download, find_trunk_weights
from vae.system.errors import UserError

ALTERNATIVES = ("--perceptual_weights FILE", "--perceptual_weight 0")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of PyTorch; downloads fail unless a test serves them."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(urllib.request, "_opener", None)  # urllib reads the proxies only once
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # refused immediately: no server on the discard port
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "torch" / "hub" / "checkpoints"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The folder and the address of a local web server."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args) -> None:
            pass

    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{serving.server_address[1]}"
    serving.shutdown()
    serving.server_close()


def name_with_hash(content: bytes) -> str:
    return f"tiny-{hashlib.sha256(content).hexdigest()[:8]}.pth"


@pytest.mark.parametrize("net", list(URLS))
def test_no_network_is_one_clear_error_without_delay(net, cache):
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        build(LossConfig(perceptual_net=net), torch.float32, "cpu")
    assert time.monotonic() - started < 30
    message = str(caught.value)
    name = URLS[net].rsplit("/", 1)[-1]
    assert "\n" not in message
    assert all(part in message for part in (net, *ALTERNATIVES))
    assert message.endswith(f": curl -L --create-dirs -o {cache / name} {URLS[net]}")
    assert not list(cache.iterdir())  # no incomplete file


def test_download_goes_to_the_cache_and_is_not_repeated(cache, server, monkeypatch):
    folder, address = server
    content = b"weights" * 1000
    name = name_with_hash(content)
    (folder / name).write_bytes(content)
    monkeypatch.setitem(trunk_weights.URLS, "alex", f"{address}/{name}")
    assert find_trunk_weights("alex", None) == cache / name
    (folder / name).unlink()
    assert find_trunk_weights("alex", None).read_bytes() == content
    assert [path.name for path in cache.iterdir()] == [name]


def test_damaged_download_leaves_no_file(tmp_path, cache, server):
    folder, address = server
    (folder / "tiny-00000000.pth").write_bytes(b"something else")
    with pytest.raises(OSError, match="hash"):
        download(f"{address}/tiny-00000000.pth", tmp_path / "new" / "tiny-00000000.pth")
    with pytest.raises(OSError, match="404"):
        download(f"{address}/absent.pth", tmp_path / "new" / "absent.pth")
    assert not list((tmp_path / "new").iterdir())


def test_missing_file_is_an_error(tmp_path):
    for path in (tmp_path / "absent.pth", tmp_path):
        with pytest.raises(UserError, match=r"--perceptual_weights .* is not a file"):
            find_trunk_weights("vgg", path)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_unreadable_file_is_one_clear_error(suffix, weights_files, tmp_path):
    whole = as_file(weights_files["squeeze"], tmp_path / f"whole{suffix}").read_bytes()
    bad = (b"", b"<html>not found</html>" * 10, whole[: len(whole) // 2], b"\xff" * 64 + whole[64:])
    for number, content in enumerate(bad):
        path = tmp_path / f"bad_{number}{suffix}"
        path.write_bytes(content)
        with pytest.raises(UserError, match="not a readable weights file") as caught:
            build_perceptual("squeeze", str(path), torch.float32, "cpu")
        assert "\n" not in str(caught.value)
        assert all(part in str(caught.value) for part in (str(path), *ALTERNATIVES))


def test_weights_of_another_network_or_other_contents_are_an_error(weights_files, tmp_path):
    with pytest.raises(UserError, match="another network than vgg16"):
        build_perceptual("vgg", weights_files["alex"], torch.float32, "cpu")
    for number, content in enumerate(({"x": torch.zeros(1)}, [1, 2], {1: 2})):
        path = tmp_path / f"{number}.pth"
        torch.save(content, path)
        with pytest.raises(UserError, match=r"no tensors named features"):
            build_perceptual("vgg", path, torch.float32, "cpu")


def test_code_in_a_file_is_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"features.0.weight": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(UserError, match="not a readable weights file"):
        build_perceptual("vgg", tmp_path / "evil.pth", torch.float32, "cpu")
    assert not (tmp_path / "ran").exists()


def test_safetensors_and_half_precision_files_are_read(weights_files, tmp_path):
    images = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    expected = build_perceptual("squeeze", weights_files["squeeze"], torch.float32, "cpu")(images, -images)
    path = as_file(weights_files["squeeze"], tmp_path / "squeeze.safetensors")
    assert torch.equal(build_perceptual("squeeze", path, torch.float32, "cpu")(images, -images), expected)
    half = {name: value.half() for name, value in torch.load(path.parent / "copy.pth").items()}
    torch.save(half, tmp_path / "half.pt")
    found = build_perceptual("squeeze", tmp_path / "half.pt", torch.float32, "cpu")(images, -images)
    assert torch.allclose(found, expected, rtol=0.01)


def as_file(source: Path, target: Path) -> Path:
    """Write the weights of `source` to `target`, in the format of its file extension."""
    weights = torch.load(source, weights_only=True)
    torch.save(weights, target.parent / "copy.pth")
    if target.suffix == ".safetensors":
        save_file({name: value.contiguous() for name, value in weights.items()}, target)
    else:
        torch.save(weights, target)
    return target
