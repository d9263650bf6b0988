"""An operation in eager mode: the same results as the operator that compilers see, for less work."""

import pytest
import torch

from vae.ops.norm import group_norm_silu


def inputs():
    h = torch.randn(2, 8, 5, 6, generator=torch.Generator().manual_seed(0))
    return [t.requires_grad_() for t in (h, torch.rand(8), torch.rand(8))]


def test_eager_results_equal_those_of_the_operator():
    tensors = inputs()
    eager = group_norm_silu(*tensors, 4, 1e-6)
    operator = torch.ops.vae.norm(*tensors, 4, 1e-6, True)[0]
    assert torch.equal(eager, operator)
    for found, expected in zip(
        torch.autograd.grad(eager.sum(), tensors), torch.autograd.grad(operator.sum(), tensors), strict=True
    ):
        assert torch.equal(found, expected)


def test_eager_mode_calls_no_operator_of_ours():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        group_norm_silu(*inputs(), 4, 1e-6).sum().backward()
    assert not [event.key for event in profile.key_averages() if event.key.startswith("vae::")]


def test_results_without_a_gradient_cost_nothing():
    tensors, seen = inputs(), []
    out = group_norm_silu(*tensors, 4, 1e-6)
    out.grad_fn.register_prehook(lambda grads: seen.append([grad is None for grad in grads]))
    out.sum().backward()
    assert seen == [[False, True]]  # no gradient of the statistics


def test_a_second_derivative_is_an_error():
    tensors = inputs()
    loss = group_norm_silu(*tensors, 4, 1e-6).square().sum()
    (grad,) = torch.autograd.grad(loss, tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
