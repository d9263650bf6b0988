"""DINOv2's distance: tokens of an independent implementation, whole crops, one tile in memory at a time."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.models import VisionTransformer as TorchvisionTransformer

from tests.harness.images import pair
from tests.harness.memory_of_a_gpu import memory_of_a_gpu
from tests.harness.step_predictions import PIXELS_ONLY, SPEC, check_prediction
from tests.harness.toy_networks import random_dino
from vae.losses.dino import DinoDistance, build_dino, slices
from vae.memory.live_bytes import LiveBytes
from vae.memory.plan import step_memory
from vae.system.errors import UserError

DINO = replace(PIXELS_ONLY, perceptual_weight=1.0, perceptual_net="dinov2-s")


@pytest.fixture(scope="module")
def weights_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dino") / "random.pth"
    torch.save(random_dino(torch.float32).network.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def distance(weights_file: Path) -> DinoDistance:
    return build_dino(weights_file, torch.float32, "cpu")


def torchvision_tokens(weights: dict[str, Tensor], positions: Tensor, images: Tensor) -> list[Tensor]:
    """The tokens after each block of torchvision's network with weights of DINOv2, of images in [-1, 1]."""
    side = images.shape[3]
    network = TorchvisionTransformer(side, 14, 12, 6, 384, 1536).eval()
    heads = {name: value for name, value in network.state_dict().items() if name.startswith("heads")}
    given = {"class_token": weights["cls_token"], "encoder.pos_embedding": positions}
    for kind in ("weight", "bias"):
        given[f"conv_proj.{kind}"] = weights[f"patch_embed.proj.{kind}"]
        given[f"encoder.ln.{kind}"] = weights[f"norm.{kind}"]
        for index in range(12):
            ours, theirs = f"blocks.{index}.", f"encoder.layers.encoder_layer_{index}."
            for norm in (1, 2):
                given[f"{theirs}ln_{norm}.{kind}"] = weights[f"{ours}norm{norm}.{kind}"]
            given[f"{theirs}self_attention.in_proj_{kind}"] = weights[f"{ours}attn.qkv.{kind}"]
            given[f"{theirs}mlp.0.{kind}"] = weights[f"{ours}mlp.fc1.{kind}"]
            for scale, last, name in (
                ("ls1", "attn.proj", "self_attention.out_proj"),
                ("ls2", "mlp.fc2", "mlp.3"),
            ):
                gamma, last_weight = weights[f"{ours}{scale}.gamma"], weights[f"{ours}{last}.{kind}"]
                scaled = gamma[:, None] * last_weight if kind == "weight" else gamma * last_weight
                given[f"{theirs}{name}.{kind}"] = scaled
    network.load_state_dict(given | heads)
    tokens: list[Tensor] = []
    for layer in network.encoder.layers:
        layer.register_forward_hook(lambda module, inputs, output: tokens.append(output))
    network(
        ((images + 1) / 2 - torch.tensor([0.485, 0.456, 0.406])[:, None, None])
        / torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    )
    return tokens


def test_value_and_gradient_are_those_of_torchvisions_network(distance, weights_file):
    recon, images = pair(2, 56)
    leaves = [recon.clone().requires_grad_() for _ in range(2)]
    weights = torch.load(weights_file, weights_only=True)
    positions = distance.network._positions(4, 4)
    tokens = zip(*(torchvision_tokens(weights, positions, each) for each in (leaves[0], images)), strict=True)
    expected = torch.stack(
        [(F.normalize(a, dim=2) - F.normalize(b, dim=2)).square().sum(2).mean(1) for a, b in tokens]
    ).mean(0)
    target = images.clone().requires_grad_()
    found = distance(leaves[1], target)
    assert expected.min() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    shares = torch.tensor([1.0, -0.5])
    (expected * shares).sum().backward()
    (found * shares).sum().backward()
    assert (leaves[1].grad - leaves[0].grad).norm() < 1e-4 * leaves[0].grad.norm()
    assert target.grad is None
    assert not any(weight.requires_grad for weight in distance.parameters())


def test_tiles_cover_large_crops_at_their_own_resolution():
    assert [(s.start, s.stop) for s in slices(1024)] == [(0, 518), (506, 1024)]
    assert [(s.start, s.stop) for s in slices(512)] == [(0, 504)]
    for side in range(14, 5000, 2):
        tiles = slices(side)
        assert {tile.stop - tile.start for tile in tiles} <= set(range(14, 519, 14))
        assert all(earlier.stop >= later.start for earlier, later in pairwise(tiles))
        assert tiles[0].start == 0
        assert side - 13 <= tiles[-1].stop <= side
        assert side <= 518 or tiles[-1].stop == side


def test_a_large_crop_has_the_mean_value_and_gradient_of_its_tiles(distance):
    recon, images = pair(2, 518)
    wide = [torch.cat([each[:1, :, :28], each[1:, :, :28]], 3).requires_grad_() for each in (recon, images)]
    alone = recon[:, :, :28].clone().requires_grad_()
    value, values = distance(*wide), distance(alone, images[:, :, :28])
    torch.testing.assert_close(value, values.mean(0, keepdim=True))
    value.sum().backward()
    values.mean().backward()
    torch.testing.assert_close(wide[0].grad, torch.cat([*alone.grad[:, None]], 3), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_half_precision_is_close(distance, weights_file, dtype, tolerance):
    """Tokens have 8 or 11 bits; the sum is fp32."""
    recon, images = pair(2, 56)
    leaves = [recon.to(dtype).requires_grad_(), recon.to(dtype).float().requires_grad_()]
    found, exact = build_dino(weights_file, dtype, "cpu")(leaves[0], images), distance(leaves[1], images)
    torch.testing.assert_close(found, exact, rtol=tolerance, atol=0)
    found.sum().mul(1e4).backward()  # fp16 gradients of the step are scaled
    exact.sum().mul(1e4).backward()
    assert F.cosine_similarity(leaves[0].grad.float().flatten(), leaves[1].grad.flatten(), dim=0) > 0.99


@pytest.mark.slow
def test_the_memory_plan_equals_the_step(weights_file):
    loss = replace(DINO, perceptual_weights=str(weights_file))
    spec = replace(SPEC, loss=loss, image_size=56, batch=2)
    with memory_of_a_gpu():
        predicted = check_prediction(spec, 1)
    assert predicted.resident - step_memory(replace(spec, loss=PIXELS_ONLY), 1).resident > 84e6


def test_one_tile_at_a_time_is_in_memory():
    distance = build_dino(None, torch.bfloat16, "meta")
    peaks = []
    for width in (504, 2016):
        recon, images = torch.empty(2, 1, 3, 504, width, device="meta")
        with LiveBytes() as counter:
            distance(recon.requires_grad_(), images).sum().backward()
        peaks.append(counter.peak)
    more_pixels = 504 * (2016 - 504)
    assert peaks[1] - peaks[0] < 50 * more_pixels  # the gradient of pixels; a graph has 590 bytes per pixel


def test_too_small_images_and_other_files_are_clear_errors(distance, tmp_path):
    with pytest.raises(UserError, match=r"16 x 13 px .* 14 px .*--image_size"):
        distance(*torch.zeros(2, 1, 3, 13, 16))
    torch.save(
        {**distance.network.state_dict(), "register_tokens": torch.zeros(1, 4, 384)}, tmp_path / "r.pth"
    )
    with pytest.raises(UserError, match=r"r\.pth is from another network than dinov2_vits14_pretrain"):
        build_dino(tmp_path / "r.pth", torch.float32, "cpu")
