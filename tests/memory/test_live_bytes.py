"""Live bytes of sequences that can be counted by hand, on one device and on several."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vae.memory.live_bytes import LiveBytes
from vae.ops.norm import group_norm

KIB = 1024  # bytes of 256 fp32 values


def block(count: int = 1) -> torch.Tensor:
    return torch.empty(256 * count, device="meta")


def test_storages_count_while_alive():
    with LiveBytes() as counter:
        a = block()
        b = block(2)
        assert counter.current == 3 * KIB
        del a
        assert counter.current == 2 * KIB
        c = b + 1
        assert counter.current == 4 * KIB
        del b
        assert counter.current == 2 * KIB
    assert counter.peak == 4 * KIB
    assert c.numel() == 512


def test_views_and_in_place_results_count_once():
    with LiveBytes() as counter:
        a = block(4)
        view = a.view(2, 512)[1].reshape(16, 32).t()
        a.add_(1)
        a.relu_()
        assert counter.current == counter.peak == 4 * KIB
        del a
        assert counter.current == 4 * KIB  # the view keeps the storage alive
        del view
        assert counter.current == 0


def test_reused_address_of_an_earlier_storage_counts():
    # another storage may get an address as soon as its storage is freed
    outside = [block() for _ in range(50)]
    with LiveBytes() as counter:
        for tensor in outside:
            tensor.add_(1)
        del tensor
        outside.clear()
        kept = [block() for _ in range(50)]
        assert counter.current == 50 * KIB
    assert len(kept) == 50


def test_small_graph_forward_and_backward():
    x = block().requires_grad_()
    with LiveBytes() as counter:
        h = x * 2  # 1: saves only the number
        y = h.exp()  # 2: saves its result
        del h  # 1
        loss = y.sum()  # 1 and a scalar
        assert counter.current == KIB + 4
        assert counter.peak == 2 * KIB
        loss.backward()
        # alive at the peak: y, the scalar, its gradient of ones, grad y expanded (a view), its product with y
    assert x.grad.untyped_storage().nbytes() == KIB
    del y, loss
    assert counter.current == KIB  # x.grad
    assert 2 * KIB <= counter.peak <= 3 * KIB + 8


def test_flops_of_matrix_products_forward_and_backward():
    layer = torch.nn.Linear(32, 64, device="meta")
    with LiveBytes() as counter:
        layer(torch.empty(16, 32, device="meta", requires_grad=True)).sum().backward()
    assert counter.flops == 3 * (2 * 16 * 32 * 64)


def test_backward_of_silu_is_one_kernel():
    x = block().requires_grad_()
    with LiveBytes() as counter:
        y = torch.nn.functional.silu(x)
        y.backward(torch.ones_like(y))
    assert counter.peak == 3 * KIB  # y, its gradient, x.grad


def test_convolutions_copy_features_of_another_layout():
    x = torch.empty(2, 8, 16, 16, device="meta")
    peaks = []
    for layout in (torch.contiguous_format, torch.channels_last):
        weight = torch.empty(8, 8, 1, 1, device="meta").to(memory_format=layout)
        with LiveBytes(within_kernels=True) as counter:
            torch.nn.functional.conv2d(x, weight)
        peaks.append(counter.peak)
    assert peaks == [x.nbytes, 2 * x.nbytes]


def test_backward_of_a_convolution_copies_the_gradient_twice():
    x = torch.empty(2, 8, 16, 16, device="meta")
    peaks = []
    for layout in (torch.contiguous_format, torch.channels_last):
        weight = torch.empty(8, 8, 1, 1, device="meta").to(memory_format=layout).requires_grad_()
        y = torch.nn.functional.conv2d(x, weight)
        with LiveBytes(within_kernels=True) as counter:
            y.backward(torch.empty_like(y))
        peaks.append(counter.peak - weight.nbytes)
    assert peaks == [y.nbytes, 3 * y.nbytes]  # the gradient, and its copies


def test_backward_of_softmax_takes_the_product_of_its_inputs():
    x = torch.empty(256, device="meta", requires_grad=True)
    y = x.softmax(0)
    peaks = []
    for within_kernels in (False, True):
        with LiveBytes(within_kernels=within_kernels) as counter:
            torch.autograd.grad(y, x, torch.empty_like(y), retain_graph=True)
        peaks.append(counter.peak)
    assert peaks == [2 * KIB, 3 * KIB]


def test_each_device_counts_its_own_storages():
    to_copy = torch.ops.aten._to_copy  # `to` needs a build of PyTorch for cards
    with FakeTensorMode(), torch.device("cpu"):
        before = torch.empty(1000, device="cuda")
        with LiveBytes("cuda") as cuda, LiveBytes("cpu") as cpu:
            on_cuda = before * 2  # 4,000 bytes on the card
            on_cpu = on_cuda.cpu()  # and 4,000 on the CPU
            del on_cuda
            again = to_copy(on_cpu[:500], device=torch.device("cuda"))  # 2,000 on the card
            del again
    assert (cuda.peak, cuda.current) == (4000, 0)
    assert (cpu.peak, cpu.current) == (4000, 4000)


def test_scratch_of_an_operation_counts_as_on_meta():
    def peak(counter, device):
        h = torch.empty(2, 8, 16, 16, device=device)
        weight = torch.empty(8, device=device)
        with counter:
            group_norm(h, weight, weight, 4, 1e-6)
        return counter.peak

    with FakeTensorMode():
        on_cuda = peak(LiveBytes("cuda"), "cuda")
    assert on_cuda == peak(LiveBytes(), "meta") >= 2 * 8 * 16 * 16 * 4
