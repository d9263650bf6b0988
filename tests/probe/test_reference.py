"""Pretrained references: from PyTorch's cache with real files, and one clear line for each failure."""

import hashlib
import urllib.request
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision import models

from tests.harness.convnext_file import DEPTHS, convnext_weights
from vae.probe import reference
from vae.probe.reference import SOURCES, choose_reference, load_reference
from vae.system.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of PyTorch, without a network."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(urllib.request, "_opener", None)  # urllib reads the proxies only once
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # refused immediately
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def store(content, name, monkeypatch) -> Path:
    """Write random weights to the place of the real file; its name contains its hash if the real one does."""
    source = SOURCES[name]
    torch.save(content, source.path)
    stem, _, digits = source.path.stem.partition("-")
    if not digits:
        return source.path
    actual = hashlib.sha256(source.path.read_bytes()).hexdigest()[: len(digits)]
    url = f"{source.url.rpartition('/')[0]}/{stem}-{actual}.pth"
    monkeypatch.setitem(reference.SOURCES, name, source._replace(url=url))
    return source.path.rename(SOURCES[name].path)


def convnext_features(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """The formula of Liu et al. 2022, figure 4, channels last: (B, 3, H, W) -> (B, 768)."""

    def norm(name: str, h: Tensor) -> Tensor:
        return F.layer_norm(h, h.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    def conv(name: str, h: Tensor, **options) -> Tensor:
        h = F.conv2d(h.permute(0, 3, 1, 2), w[f"{name}.weight"], w[f"{name}.bias"], **options)
        return h.permute(0, 2, 3, 1)

    h = x.permute(0, 2, 3, 1)
    for stage, depth in enumerate(DEPTHS):
        down = f"downsample_layers.{stage}"
        h = conv(f"{down}.1", norm(f"{down}.0", h), stride=2) if stage else h
        h = h if stage else norm(f"{down}.1", conv(f"{down}.0", h, stride=4))
        for name in (f"stages.{stage}.{number}" for number in range(depth)):
            inner = norm(f"{name}.norm", conv(f"{name}.dwconv", h, padding=3, groups=h.shape[-1]))
            inner = F.gelu(F.linear(inner, w[f"{name}.pwconv1.weight"], w[f"{name}.pwconv1.bias"]))
            inner = F.linear(inner, w[f"{name}.pwconv2.weight"], w[f"{name}.pwconv2.bias"])
            h = h + w[f"{name}.gamma"] * inner
    return norm("norm", h.mean((1, 2)))


def test_convnext_from_the_published_file_computes_the_published_formula(cache, monkeypatch):
    weights = convnext_weights()
    store({"model": weights}, "convnext_22k", monkeypatch)
    assert choose_reference("auto") == "convnext_22k"
    images = torch.rand(1, 3, 224, 224) * 2 - 1
    scaled = ((images + 1) / 2 - torch.tensor([0.485, 0.456, 0.406])[:, None, None]) / torch.tensor(
        [0.229, 0.224, 0.225]
    )[:, None, None]
    found = load_reference("convnext_22k", CPU)(images)
    assert found.shape == (1, 768, 1, 1)
    torch.testing.assert_close(found.flatten(1), convnext_features(weights, scaled), atol=1e-4, rtol=1e-4)


def test_resnet_has_the_features_before_its_last_layer_and_a_verified_file(cache, monkeypatch):
    network = models.resnet50().eval()
    path = store(network.state_dict(), "resnet50", monkeypatch)
    assert choose_reference("auto") == choose_reference("resnet50") == "resnet50"
    assert choose_reference("none") is None
    images = torch.zeros(1, 3, 64, 64)
    found = load_reference("resnet50", CPU)(images).flatten(1)
    mean, std = (torch.tensor(v)[:, None, None] for v in (reference.IMAGENET_MEAN, reference.IMAGENET_STD))
    expected = network(((torch.full((1, 3, 224, 224), 0.5)) - mean) / std)
    torch.testing.assert_close(network.fc(found), expected, atol=1e-4, rtol=1e-4)

    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    refused(choose_reference, "resnet50", "is damaged", "SHA-256")


@pytest.mark.parametrize("broken", ["truncated", "text", "other network", "empty"])
def test_a_broken_file_is_one_line(cache, monkeypatch, broken):
    content = {"model": {"head.weight": torch.zeros(3, 3)}}
    path = store(content, "convnext_22k", monkeypatch)
    if broken == "truncated":
        path.write_bytes(path.read_bytes()[:-200])
    elif broken != "other network":
        path.write_bytes(b"<html>" if broken == "text" else b"")
    refused(lambda name: load_reference(name, CPU), "convnext_22k", "is damaged")


def test_missing_weights_without_network_are_one_line(cache):
    assert choose_reference("auto") is None
    for name in SOURCES:
        refused(choose_reference, name, "is missing and the download failed", "--probe_reference none")
    assert not list(cache.iterdir())


def refused(open_reference, name: str, *tokens: str) -> None:
    """It raises a line with the flag, the file and its address."""
    source = SOURCES[name]
    with pytest.raises(UserError) as caught:
        open_reference(name)
    message = str(caught.value)
    assert "\n" not in message
    assert "urlopen" not in message
    for token in (f"--probe_reference {name}", str(source.path), source.url, *tokens):
        assert token in message
