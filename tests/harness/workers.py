"""Decoding processes in tests: deaths are noticed at once."""

import pytest
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from vae.data import loading


def notice_deaths_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """DataLoader looks for dead processes every 0.1 s instead of every 5 s, and waits are as short."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
    monkeypatch.setattr(loading, "POLL_SECONDS", 0.1)
