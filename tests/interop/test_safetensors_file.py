"""Safetensors files: equal content has equal bytes."""

import torch
from safetensors import safe_open

from vae.interop.writing import write_safetensors


def test_equal_content_has_equal_bytes(tmp_path):
    metadata = {name: f'{name}: "ü"\n' for name in "fedcba"}
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(1, dtype=torch.float16)}
    for number in range(8):
        write_safetensors(tmp_path / f"{number}.safetensors", tensors, metadata)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    with safe_open(tmp_path / "0.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", **metadata}
        assert file.get_tensor("b").equal(tensors["b"])
        assert file.get_tensor("a").equal(tensors["a"])
