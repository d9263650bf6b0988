"""LPIPS and rFID are found, or reported as missing with a reason, before anything is measured."""

import importlib.util

import numpy as np
import pytest
import torch

from vae.config.evaluate_flags import EvaluateConfig
from vae.evaluation import learned_metrics
from vae.evaluation.command import check_rfid_packages
from vae.evaluation.learned_metrics import ReconstructionFid, find_perceptual, find_rfid
from vae.system.errors import UserError

CPU = torch.device("cpu")


def config(**given) -> EvaluateConfig:
    return EvaluateConfig(vae=("x",), data_path=("y",), output_dir="z", **given)


@pytest.fixture
def no_weights(tmp_path, monkeypatch):
    """An empty cache, and URLs without a server."""
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    monkeypatch.setattr("vae.losses.trunk_weights.URLS", {"vgg": "http://127.0.0.1:9/vgg16-397923af.pth"})
    monkeypatch.setattr(learned_metrics, "INCEPTION_URL", "http://127.0.0.1:9/weights-6726825d.pth")
    return tmp_path


def test_unavailable_lpips_is_reported_as_missing(no_weights):
    missing: dict[str, str] = {}
    assert find_perceptual(config(), CPU, missing) == (None, None)
    assert "vgg16-397923af.pth" in missing["lpips"]
    assert "--perceptual_net none" in missing["lpips"]
    assert "train" not in missing["lpips"].replace("trained", "")


def test_unavailable_lpips_is_an_error_if_requested(no_weights):
    with pytest.raises(UserError, match=r"--perceptual_net vgg: .*--perceptual_weights FILE"):
        find_perceptual(config(perceptual_net="vgg"), CPU, {})
    with pytest.raises(UserError, match=r"--perceptual_weights gone\.pth is not a file"):
        find_perceptual(config(perceptual_weights="gone.pth"), CPU, {})


def test_lpips_can_be_disabled_or_use_random_weights():
    missing: dict[str, str] = {}
    assert find_perceptual(config(perceptual_net="none"), CPU, missing) == (None, None)
    assert "--perceptual_net none" in missing["lpips"]
    loss, net = find_perceptual(config(perceptual_net="random"), CPU, {})
    assert net == "random"
    images = torch.rand(1, 3, 32, 32)
    assert loss(images, images).item() == 0


def test_rfid_is_reported_as_missing_or_names_its_packages(monkeypatch):
    missing: dict[str, str] = {}
    assert find_rfid(config(), CPU, missing) is None
    assert "--rfid" in missing["rfid"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install torchmetrics torch-fidelity"):
        check_rfid_packages()


def test_inception_weights_are_found_and_verified(no_weights):
    with pytest.raises(UserError, match=r"--rfid: .* --inception_weights FILE"):
        find_rfid(config(rfid=True), CPU, {})
    with pytest.raises(UserError, match=r"--inception_weights gone\.pth is not a file"):
        find_rfid(config(rfid=True, inception_weights="gone.pth"), CPU, {})
    path = no_weights / "other.pth"
    torch.save({"fc.weight": torch.zeros(3, 3)}, path)
    with pytest.raises(UserError, match="another network"):
        find_rfid(config(rfid=True, inception_weights=str(path)), CPU, {})
    torch.save({"fc.weight": print}, path)  # a pickle that names a function
    with pytest.raises(UserError, match="not contain readable Inception weights"):
        find_rfid(config(rfid=True, inception_weights=str(path)), CPU, {})
    path = no_weights / "weights-6726825d.pth"
    path.write_bytes(b"torn")
    with pytest.raises(UserError, match="SHA-256"):
        find_rfid(config(rfid=True, inception_weights=str(path)), CPU, {})


@pytest.mark.slow
def test_rfid_equals_numpy(tmp_path):
    pytest.importorskip("torchmetrics")
    inception = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    real_load = inception.load_state_dict_from_url
    extractor = inception.FeatureExtractorInceptionV3
    try:  # random weights of the right shapes, saved as a file
        inception.load_state_dict_from_url = lambda *_, **__: None
        loader, extractor.load_state_dict = extractor.load_state_dict, lambda *_: None
        torch.manual_seed(0)
        network = extractor("inception", ["2048"])
    finally:
        inception.load_state_dict_from_url = real_load
        extractor.load_state_dict = loader
    path = tmp_path / "inception.pth"
    torch.save(network.state_dict(), path)
    images = torch.randint(0, 256, (6, 3, 40, 40), dtype=torch.uint8)
    recon = (images.float() * 0.5).to(torch.uint8)
    rfid = ReconstructionFid(path, CPU)
    for _ in range(2):  # `take` resets the sums
        for one, other in zip(images, recon, strict=True):
            rfid.add(one[None], other[None])
        found = rfid.take()
    assert rfid.take() is None
    torch.testing.assert_close(rfid.features(images).float(), network(images)[0], rtol=1e-3, atol=1e-4)
    real, fake = (network(values)[0].double().numpy() for values in (images, recon))
    covariances = np.cov(real, rowvar=False), np.cov(fake, rowvar=False)
    traces = sum(np.trace(one) for one in covariances)
    # The covariances have rank 5, so the trace of the root of their product is the sum of the singular values
    # of the product of the centred sets.
    centred = [(one - one.mean(0)) / np.sqrt(len(one) - 1) for one in (real, fake)]
    root = np.linalg.svd(centred[0] @ centred[1].T, compute_uv=False).sum()
    expected = np.square(real.mean(0) - fake.mean(0)).sum() + traces - 2 * root
    assert np.isclose(found, expected, rtol=1e-3)
