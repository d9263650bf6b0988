"""The ensemble is the weighted mean of the reconstructions, for VAEs of any shape."""

from dataclasses import replace

import pytest
import torch

from tests.harness.small_vae import SMALL, write_vae
from vae.config.evaluate_flags import parse_evaluate_flags
from vae.evaluation.ensemble import ensemble
from vae.evaluation.measure import VaeCodec
from vae.images.pixels import to_uint8
from vae.interop.vae_files import load_vae
from vae.system.errors import UserError

CPU = torch.device("cpu")
FLAGS = ["--data_path", "images", "--output_dir", "out"]


def test_weighted_mean_of_reconstructions(tmp_path):
    shapes = (SMALL, replace(SMALL, channels=(16, 32), z_channels=4))
    vaes = [
        load_vae(write_vae(tmp_path / str(n), n, shape, init="default")) for n, shape in enumerate(shapes)
    ]
    images = torch.randint(0, 256, (2, 3, 20, 24), dtype=torch.uint8)
    found = ensemble(vaes, (3.0, 1.0), CPU, torch.float32, None)(images, range(2))
    codecs = (VaeCodec(vae.autoencoder, torch.float32, None) for vae in vaes)
    single = [map(to_uint8, codec(images, range(2))) for codec in codecs]
    for recon, first, second in zip(found, *single, strict=True):
        assert torch.equal(recon, (0.75 * first + 0.25 * second).round().to(torch.uint8))


def test_image_without_reconstruction_has_none(tmp_path):
    vaes = [load_vae(write_vae(tmp_path / str(seed), seed, init="default")) for seed in (0, 1)]
    vaes[1].autoencoder.decoder.conv_out.bias.data.fill_(float("nan"))
    images = torch.zeros((1, 3, 16, 16), dtype=torch.uint8)
    assert ensemble(vaes, (1.0, 1.0), CPU, torch.float32, None)(images, range(1)) == [None]


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ("--vae a --ensemble", ("--ensemble", "several VAEs")),
        ("--vae a b --ensemble_weights 1 2", ("--ensemble_weights", "without --ensemble")),
        ("--vae a b --ensemble --ensemble_weights 1", ("--ensemble_weights 1", "2 --vae")),
        ("--vae a b --ensemble --ensemble_weights 0 0", ("--ensemble_weights 0 0", "above 0")),
    ],
)
def test_mistakes_are_one_line(words, tokens):
    with pytest.raises(UserError) as caught:
        parse_evaluate_flags([*words.split(), *FLAGS])
    assert all(token in str(caught.value) for token in tokens)
