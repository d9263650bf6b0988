"""Constants that were measured on a card replace those in the code, and only on this card."""

import json

import pytest
import torch

from vae import gpus
from vae.config.options import Config
from vae.memory.available import CUDA_RESERVE
from vae.memory.plan import reserve_bytes
from vae.ops import attention, gpu_blocks
from vae.ops.measured import CONSTANTS, use_measured


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A card with measured values; afterwards the defaults are used again."""
    monkeypatch.setattr(gpus, "MEASURED", tmp_path)
    content = {
        "card": "NVIDIA H100",
        "constants": {"TILE_ELEMENTS": 8192, "QUERIES_PER_CHANNEL": 2, "OLD": 1},
    }
    (tmp_path / "h100.json").write_text(json.dumps(content), encoding="utf-8")
    yield "NVIDIA H100"
    use_measured("")


def test_measured_constants_are_used_on_their_card_only(card):
    before = {name: getattr(module, name) for name, module in CONSTANTS.items()}
    use_measured(card)
    assert gpu_blocks.TILE_ELEMENTS == 8192
    assert attention.attention_blocks(1, 1000, 64, "cuda") == (1, 128)
    assert before["REDUCTION_PROGRAMS"] == gpu_blocks.REDUCTION_PROGRAMS
    use_measured("NVIDIA H100 PCIe")  # another card
    assert before == {name: getattr(module, name) for name, module in CONSTANTS.items()}


def test_warps_reach_the_launches_and_the_reserve_reaches_the_plan(card, monkeypatch):
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    from vae.ops import norm_triton

    path = gpus.measured_path(card)
    content = {"card": card, "constants": {"NUM_WARPS": 4}, "reserve_mib": 640}
    path.write_text(json.dumps(content), encoding="utf-8")
    use_measured(card)
    h, launched = torch.empty(1, 8, 4, 4), []
    monkeypatch.setattr(norm_triton, "launch", lambda kernel, grid, num_warps, *_: launched.append(num_warps))
    norm_triton.add_with_bias(h, h, torch.empty(8))
    assert launched == [4]
    assert reserve_bytes(Config(), is_gpu=True, card=card) == 640 * 2**20
    assert reserve_bytes(Config(), is_gpu=True, card="RTX 5090") == CUDA_RESERVE


def test_name_of_the_card_is_found_without_brands(card):
    assert gpus.measured_values("H100") == gpus.measured_values(card) != {}
    assert gpus.measured_values("NVIDIA GeForce RTX 5090") == {}


def test_measured_files_of_the_project_have_known_constants():
    for path in gpus.MEASURED.glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        assert gpus.measured_path(content["card"]) == path
        assert set(content["constants"]) <= set(CONSTANTS)
