"""Images of one, three and four channels: files, resizing, and what losses and metrics compare."""

from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from vae.data.dataset import CropDataset, DataConfig
from vae.data.image_files import FolderImages
from vae.evaluation.image_set import square
from vae.evaluation.metrics import baseline_sums
from vae.images.composites import as_rgb, over_checkerboard, per_image, premultiply, shown, unpremultiply
from vae.images.decoding import decode_image
from vae.images.pixels import to_float
from vae.losses.reconstruction import reconstruction_loss
from vae.losses.terms import LossTerms, Term

L1 = LossTerms(image=(Term("reconstruction", "L1", 1.0, partial(reconstruction_loss, kind="l1")),))
RED, HIDDEN_GREEN = (200, 30, 20, 255), (0, 255, 0, 0)


def cut_out(side: int = 64) -> np.ndarray:
    """Red, opaque at the left and invisibly green at the right."""
    pixels = np.empty((side, side, 4), np.uint8)
    pixels[:, : side // 2] = RED
    pixels[:, side // 2 :] = HIDDEN_GREEN
    return pixels


def random_images(seed: int, side: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(3, 4, side, side, generator=generator, dtype=torch.float64) - 1


@pytest.mark.parametrize("name", ["a.png", "a.webp", "a.tif"])
def test_alpha_is_kept_and_invisible_colors_are_black(name, tmp_path):
    pixels = cut_out()
    pixels[:, 10:20, 3] = 77
    options = {"lossless": True, "exact": True} if name == "a.webp" else {}
    Image.fromarray(pixels).save(tmp_path / name, **options)
    pixels[:, 32:] = 0
    assert np.array_equal(decode_image(tmp_path / name, channels=4), pixels)
    grey = np.asarray(Image.fromarray(decode_image(tmp_path / name, background="black")).convert("L"))
    assert np.array_equal(decode_image(tmp_path / name, background="black", channels=1)[..., 0], grey)


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_images_without_alpha_are_opaque(name, tmp_path):
    Image.fromarray(cut_out()[..., :3]).save(tmp_path / name)
    pixels = decode_image(tmp_path / name, channels=4)
    assert np.array_equal(pixels[..., :3], decode_image(tmp_path / name))
    assert (pixels[..., 3] == 255).all()


def test_alpha_turns_with_the_image(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    pixels = cut_out()
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(decode_image(tmp_path / "a.png", channels=4)[..., 3], np.rot90(pixels[..., 3], -1))


@pytest.mark.parametrize(
    "data",
    [
        {"crop": "resized", "crop_scale": (0.9, 1.0)},
        {"rotate90": True, "horizontal_flip": True},
        {"color_jitter": (0.3, 0.3, 0.3, 0.3)},
        {"upscale": True},
    ],
)
def test_invisible_colors_do_not_bleed_into_crops(data, tmp_path):
    """Green is nowhere in the crops, though half of the file is green: as without augmentations."""
    Image.fromarray(cut_out()).save(tmp_path / "a.png")
    size = 96 if "upscale" in data else 48
    crops = CropDataset(
        FolderImages(tmp_path, ["a.png"]), DataConfig(**data), image_size=size, channels=4, seed=1
    )
    transparent = 0
    for epoch in range(8):
        image = crops[epoch, 0].image.int()
        colors, alpha = image[:3], image[3]
        if "color_jitter" not in data:
            # at the edge of a resized image, colors are stored in 8 bits times alpha
            assert (colors[1] <= 40)[alpha > 64].all()
        assert not colors[:, alpha == 0].any()
        transparent += int((alpha == 0).sum())
    assert transparent > 0


def test_grey_crops_are_jittered(tmp_path):
    Image.fromarray(cut_out()[..., :3]).save(tmp_path / "a.png")
    data = DataConfig(color_jitter=(0.3, 0.3, 0.3, 0.3), crop="resized")
    crops = CropDataset(FolderImages(tmp_path, ["a.png"]), data, image_size=16, channels=1)
    images = [crops[epoch, 0].image for epoch in range(4)]
    assert {tuple(image.shape) for image in images} == {(1, 16, 16)}
    assert len({image.numpy().tobytes() for image in images}) > 1


def test_resized_squares_have_no_halo():
    small = square(cut_out(), 24, "resize").astype(int)
    visible = small[..., 3] > 64
    assert np.abs(small[visible][:, :3] - RED[:3]).max() <= 3


# ---- What losses and metrics compare -----------------------------------------------------------------------


def test_the_mean_square_over_both_backgrounds_is_the_closed_form():
    """(ΔP)² - 2 E[b] ΔP Δα + E[b²] Δα² with b = -1 or 1, for colors P = rgb α (AlphaVAE)."""
    recon, images = random_images(0), random_images(1)
    found = per_image(reconstruction_loss(as_rgb(recon), as_rgb(images), "mse"), 3)
    (p, a), (q, b) = ((x[:, :3] * (x[:, 3:] + 1) / 2, (x[:, 3:] + 1) / 2) for x in (recon, images))
    expected = ((p - q).square() + (a - b).square()).flatten(1).mean(1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    absolute = per_image(reconstruction_loss(as_rgb(recon), as_rgb(images), "l1"), 3)
    larger = torch.maximum((p - q).abs(), (a - b).abs().expand_as(p)).flatten(1).mean(1)
    torch.testing.assert_close(absolute, larger, rtol=1e-12, atol=0)


def test_nothing_is_learned_of_invisible_colors():
    recon, images = random_images(0), random_images(1)
    recon[:, 3] = images[:, 3] = -1
    recon.requires_grad_()
    per_image(reconstruction_loss(as_rgb(recon), as_rgb(images), "l1"), 3).sum().backward()
    assert not recon.grad[:, :3].any()


def test_opaque_images_are_their_own_composites():
    images = random_images(0)
    images[:, 3] = 1
    for composites in (as_rgb(images).split(3), [over_checkerboard(images)]):
        for composite in composites:
            torch.testing.assert_close(composite, images[:, :3], rtol=0, atol=1e-15)
    grey = images[:, :1]
    assert torch.equal(as_rgb(grey), grey.repeat(1, 3, 1, 1))
    assert as_rgb(images[:, :3]).shape == (3, 3, 16, 16)


def test_premultiplied_colors_return():
    images = random_images(0)
    images[0, 3, :4] = -1
    torch.testing.assert_close(unpremultiply(premultiply(images))[1:], images[1:], rtol=0, atol=1e-9)
    assert (unpremultiply(premultiply(images))[0, :3, :4] == -1).all()


def test_the_bicubic_baseline_of_a_cut_out_is_that_of_its_composites():
    """Filters are linear: they reduce the image over a background as they reduce color and alpha."""
    images = to_float(torch.from_numpy(cut_out()).movedim(-1, 0)[None])
    sums = baseline_sums([images], L1)["bicubic"]
    over_white = baseline_sums([as_rgb(images)[1:]], L1)["bicubic"]
    over_black = baseline_sums([as_rgb(images)[:1]], L1)["bicubic"]
    expected = (over_white["psnr"][0] + over_black["psnr"][0]) / 2
    assert sums["psnr"][0] == pytest.approx(expected, abs=0.2)  # limited to 0 to 1, and rounded
    assert sums["psnr_alpha"][1] == 1
    assert over_white["psnr_alpha"] == (0.0, 0)


def test_images_to_look_at_have_a_checkerboard():
    seen = np.asarray(shown(Image.fromarray(cut_out())))
    assert (seen[:, :32] == RED[:3]).all()
    assert len(np.unique(seen[:, 32:])) == 2
    assert shown(Image.new("RGB", (4, 4))).mode == "RGB"
