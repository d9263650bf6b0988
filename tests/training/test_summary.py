"""What a run says of itself before it starts."""

from types import SimpleNamespace

import pytest
import torch

from vae.config.options import Config
from vae.memory.plan import GIB
from vae.training.summary import _device


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [("NVIDIA GeForce RTX 5090", 31.36, True), ("NVIDIA GeForce RTX 5060 Ti", 7.5, False)],
)
def test_a_card_without_profile_is_said(monkeypatch, name, gib, known):
    facts = SimpleNamespace(name=name, total_memory=int(gib * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    run = SimpleNamespace(
        processes=SimpleNamespace(device=torch.device("cuda", 0), world=1),
        networks=SimpleNamespace(dtype=torch.bfloat16),
        config=Config(),
        compiled=False,
    )
    line = _device(run)
    assert name in line
    assert ("no profile" in line) != known
    assert "bf16" in line
