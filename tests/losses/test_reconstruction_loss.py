"""The per-pixel term: values computed by hand, and precision."""

import pytest
import torch
from jaxtyping import TypeCheckError

from vae.losses.reconstruction import reconstruction_loss


def test_values_by_hand():
    images = torch.zeros(2, 3, 4, 5)
    recon = images.clone()
    recon[0] += 0.5
    recon[1, 0] -= 0.25  # one channel of three
    assert torch.allclose(reconstruction_loss(recon, images, "l1"), torch.tensor([0.5, 0.25 / 3]))
    assert torch.allclose(reconstruction_loss(recon, images, "mse"), torch.tensor([0.25, 0.0625 / 3]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_averaged_in_fp32(dtype):
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    recon = (images * 0.9).to(dtype)
    exact = (recon.double() - images.double()).abs().mean()
    loss = reconstruction_loss(recon, images, "l1")
    assert loss.dtype == torch.float32
    assert abs(loss.item() - exact.item()) < 1e-7  # fp32 rounding of values near 0.05


def test_tests_check_shape_annotations():
    with pytest.raises(TypeCheckError, match="images"):
        reconstruction_loss(torch.zeros(2, 3, 8, 8), torch.zeros(1, 3, 8, 8), "l1")
