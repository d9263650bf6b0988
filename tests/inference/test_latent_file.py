"""Latent files: a round trip is exact, and unusable files are refused with a reason."""

import sys

import pytest
import torch
from safetensors.torch import save_file

from tests.harness.small_vae import SMALL
from vae.inference.latent_file import (
    BadLatentsError,
    Latents,
    LatentSource,
    encoder_fingerprint,
    load_latents,
    save_latents,
)
from vae.interop.latent_statistics import LatentConstants
from vae.model.autoencoder import AutoencoderKL, Posterior

any_bytes = pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode")
SOURCE = LatentSource("a" * 64, 4, 8, LatentConstants(0.5))


def latents() -> Latents:
    torch.manual_seed(0)
    return Latents(Posterior(torch.randn(1, 4, 3, 5), torch.randn(1, 4, 3, 5)), (20, 33))


def reason(path, source=SOURCE, **others) -> str:
    with pytest.raises(BadLatentsError) as caught:
        load_latents(path, source, **others)
    return caught.value.reason


@pytest.mark.parametrize("folder", ["deep", pytest.param("caf\udce9", marks=any_bytes)])
def test_round_trip_is_exact(folder, tmp_path):
    path = tmp_path / folder / "one.safetensors"
    save_latents(path, latents(), SOURCE, "one.png")
    found = load_latents(path, SOURCE)
    assert torch.equal(found.posterior.mean, latents().posterior.mean)
    assert torch.equal(found.posterior.logvar, latents().posterior.logvar)
    assert found.size == (20, 33)
    assert [entry.name for entry in path.parent.iterdir()] == ["one.safetensors"]  # no temporary file


def test_latents_of_another_encoder_or_shape_are_refused(tmp_path):
    path = tmp_path / "one.safetensors"
    save_latents(path, latents(), SOURCE, "one.png")
    other = LatentSource("b" * 64, 4, 8, LatentConstants())
    assert reason(path, other) == "latents_of_another_vae"
    assert load_latents(path, other, any_vae=True).size == (20, 33)
    assert reason(path, LatentSource("b" * 64, 16, 8, LatentConstants()), any_vae=True) == "wrong_shape"
    assert reason(path, LatentSource("b" * 64, 4, 16, LatentConstants()), any_vae=True) == "wrong_shape"


def test_truncated_files_are_refused(tmp_path):
    path = tmp_path / "one.safetensors"
    save_latents(path, latents(), SOURCE, "one.png")
    content = path.read_bytes()
    for length in (0, 4, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        assert reason(path) == "damaged", length


def test_files_with_other_content_are_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"encoder.conv_in.weight": torch.zeros(2)}, path)
    assert reason(path) == "not_latents"
    assert reason(path, any_vae=True) == "not_latents"
    save_file({"latents": torch.zeros(4, 2, 2)}, path)
    assert reason(path) == "not_latents"
    assert load_latents(path, SOURCE, any_vae=True).size == (16, 16)
    save_file({"latents": torch.zeros(4, 2, 2)}, path, {"format": "vae-latents-1"})  # of an earlier version
    with pytest.raises(BadLatentsError, match=r"format vae-latents-1, not .* add --any_vae"):
        load_latents(path, SOURCE)
    for expected, tensors, metadata in (  # each in a file of its own: Windows replaces no mapped file
        ("damaged", {"latents": torch.zeros(4, 2, 2)}, {"height": "sixteen"}),
        ("wrong_shape", {"latents": torch.zeros(4, 2, 2), "logvar": torch.zeros(4, 2, 1)}, None),
        ("not_finite", {"latents": torch.full((4, 2, 2), torch.nan)}, None),
    ):
        save_file(tensors, tmp_path / f"{expected}.safetensors", metadata)
        assert reason(tmp_path / f"{expected}.safetensors", any_vae=True) == expected
    path = tmp_path / "pickle.safetensors"
    torch.save({"latents": torch.zeros(4, 2, 2)}, path)  # a pickle with this extension is not unpickled
    assert reason(path) == "damaged"


def test_fingerprint_depends_only_on_the_encoder():
    model = AutoencoderKL(SMALL)
    before = encoder_fingerprint(model)
    with torch.no_grad():
        model.decoder.conv_out.bias += 1
        assert encoder_fingerprint(model) == before
        model.encoder.conv_out.bias[0] += 1e-3
        assert encoder_fingerprint(model) != before
