"""Bytes on one of several devices: what lies on the other, or was there before, is not counted."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vae.memory.device_bytes import DeviceBytes
from vae.memory.live_bytes import LiveBytes
from vae.ops.norm import group_norm


def test_each_device_counts_its_own():
    with FakeTensorMode(), torch.device("cpu"):
        before = torch.empty(1000, device="cuda")
        with DeviceBytes("cuda") as card, DeviceBytes("cpu") as host:
            on_card = before * 2  # 4,000 bytes there
            on_host = on_card.cpu()  # and 4,000 here
            del on_card
            again = on_host[:500].to("cuda")  # 2,000 there
            del again
    assert (card.peak, card.current) == (4000, 0)
    assert (host.peak, host.current) == (4000, 4000)


def test_scratch_of_an_operation_counts_as_on_meta():
    def peak(counter, device):
        h = torch.empty(2, 8, 16, 16, device=device)
        weight = torch.empty(8, device=device)
        with counter:
            group_norm(h, weight, weight, 4, 1e-6)
        return counter.peak

    with FakeTensorMode():
        found = peak(DeviceBytes("cuda"), "cuda")
    assert found == peak(LiveBytes(), "meta") >= 2 * 8 * 16 * 16 * 4
