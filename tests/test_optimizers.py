"""Muon: its update is the published one, in both layouts; a skipped step changes nothing."""

import math

import pytest
import torch

from vae import optimizers
from vae.config.model_options import ModelConfig
from vae.config.options import LossConfig, OptimConfig
from vae.config.resolve import tiny_shape
from vae.model.autoencoder import AutoencoderKL
from vae.optimizers import Muon, build_optimizers, parameter_groups
from vae.update import UpdateState, apply_update

LEARNING_RATE, BETAS, WEIGHT_DECAY = 1e-2, (0.9, 0.99), 0.1
SHAPES = [(4, 6, 3, 3), (4, 6, 3, 3), (4, 4, 3, 3), (4, 6, 1, 1), (6, 4, 1, 1), (8, 8), (9, 2), (8,)]


def weights_of(layout: torch.memory_format) -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=random) for shape in SHAPES]
    return [
        torch.nn.Parameter(value.to(memory_format=layout) if value.ndim == 4 else value) for value in values
    ]


def muon_of(weights: list[torch.nn.Parameter]) -> Muon:
    return Muon(weights[-1:], [], weights[:-1], LEARNING_RATE, BETAS, WEIGHT_DECAY)


def set_gradients(weights: list[torch.nn.Parameter], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for weight in weights:  # a gradient in the layout of its weight, as from autograd
        weight.grad = torch.empty_like(weight).copy_(torch.randn(weight.shape, generator=random))


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """The formula of Jordan et al. 2024."""
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def expected_weights(steps: int) -> list[torch.Tensor]:
    """The weights after steps with the seeds 1, 2, ..., in fp64 and one by one, with PyTorch's AdamW."""
    weights = weights_of(torch.contiguous_format)
    found = [weight.detach().double() for weight in weights[:-1]]
    momenta = [torch.zeros_like(value) for value in found]
    adamw = torch.optim.AdamW(weights[-1:], LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    for step in range(steps):
        set_gradients(weights, step + 1)
        adamw.step()
        for value, momentum, weight in zip(found, momenta, weights, strict=False):
            gradient = weight.grad.double()
            momentum.mul_(0.95).add_(0.05 * gradient)
            update = newton_schulz((0.05 * gradient + 0.95 * momentum).flatten(1)).reshape(value.shape)
            rate = LEARNING_RATE * 0.2 * math.sqrt(max(len(value), value[0].numel()))
            value.mul_(1 - LEARNING_RATE * WEIGHT_DECAY).sub_(rate * update)
    return [*found, weights[-1].detach()]


@pytest.mark.parametrize("batch_elements", [1, 300, 2**25])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_update_equals_the_formula_of_each_matrix(monkeypatch, layout, batch_elements):
    monkeypatch.setattr(optimizers, "BATCH_ELEMENTS", batch_elements)
    weights = weights_of(layout)
    muon = muon_of(weights)
    for step in range(3):
        set_gradients(weights, step + 1)
        muon.step()
    expected = expected_weights(3)
    for weight, value in zip(weights[:-1], expected[:-1], strict=True):
        # fp32, and five steps of Newton-Schulz
        torch.testing.assert_close(weight.detach().double(), value, rtol=0, atol=1e-5)
        assert weight.ndim != 4 or weight.is_contiguous(memory_format=layout)
    assert torch.equal(weights[-1], expected[-1])


def test_update_has_the_size_of_an_update_of_adamw():
    """Orthogonal matrices with c columns have a root mean square of 1 / sqrt(c)."""
    torch.manual_seed(0)
    for shape in ((32, 16, 3, 3), (64, 64), (64, 16, 1, 1)):
        weight = torch.nn.Parameter(torch.zeros(shape))
        muon = Muon([], [], [weight], 1e-3, BETAS, 0.0)
        weight.grad = torch.randn(shape)
        muon.step()
        assert float(weight.detach().square().mean().sqrt()) == pytest.approx(0.2e-3, rel=0.2)


@pytest.mark.parametrize("scale", [1e-4, 1e12])
def test_scale_of_the_gradient_changes_nothing(scale):
    weights, others = weights_of(torch.channels_last)[:-1], weights_of(torch.channels_last)[:-1]
    set_gradients(weights, 1)
    set_gradients(others, 1)
    torch._foreach_mul_([other.grad for other in others], scale)
    Muon([], [], weights, LEARNING_RATE, BETAS, 0.0).step()
    Muon([], [], others, LEARNING_RATE, BETAS, 0.0).step()
    for weight, other in zip(weights, others, strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-5)


def test_state_is_loaded_onto_the_device_of_the_weights():
    """Fused AdamW needs its counts of steps there too; `meta` stands for a card."""
    weights = weights_of(torch.channels_last)
    set_gradients(weights, 1)
    source = muon_of(weights)
    source.step()
    target = muon_of([torch.nn.Parameter(torch.empty_like(weight, device="meta")) for weight in weights])
    target.load_state_dict(source.state_dict())
    states = [value for values in target.state.values() for value in values.values()]
    assert len(states) == len(weights) - 1 + 3
    assert {value.device.type for value in states} == {"meta"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("first", [True, False], ids=["first_step", "later_step"])
def test_non_finite_gradient_changes_no_weight_and_no_moment(bad, first):
    weights, state = weights_of(torch.channels_last), UpdateState.begin(torch.device("cpu"), fp16=True)
    muon, optim = muon_of(weights), OptimConfig()
    if not first:
        set_gradients(weights, 1)
        apply_update([muon], state, optim, fp16=True, empty=False)
    before = [weight.detach().clone() for weight in weights]
    moments = [{name: value.clone() for name, value in muon.state[weight].items()} for weight in weights]
    set_gradients(weights, 2)
    weights[1].grad[0, 0] = bad
    apply_update([muon], state, optim, fp16=True, empty=False)
    assert float(state.nonfinite_streak) == 1
    for weight, old, values in zip(weights, before, moments, strict=True):
        assert torch.equal(weight, old)
        for name, value in muon.state[weight].items():
            assert torch.equal(value, values.get(name, torch.zeros_like(value))), name
    set_gradients(weights, 3)
    apply_update([muon], state, optim, fp16=True, empty=False)
    assert all(not torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))


def test_hidden_weights_are_those_between_the_first_and_the_last_layers():
    model = AutoencoderKL(
        ModelConfig(channels=(8, 16), layers_per_block=1, norm_groups=4, use_quant_conv=True)
    )
    others, ends, hidden = parameter_groups(model, "muon")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with_adamw = {names[id(parameter)] for parameter in [*others, *ends] if parameter.ndim >= 2}
    outer = ("encoder.conv_in", "encoder.conv_out", "decoder.conv_in", "decoder.conv_out")
    assert with_adamw == {f"{name}.weight" for name in (*outer, "quant_conv", "post_quant_conv")}
    assert {names[id(parameter)] for parameter in hidden} | with_adamw == {
        name for name, parameter in model.named_parameters() if parameter.ndim >= 2
    }
    assert any("attentions" in names[id(parameter)] for parameter in hidden)
    assert len(others) + len(ends) + len(hidden) == len(names)
    tiny = AutoencoderKL(ModelConfig(**tiny_shape(4, 2)))
    of_tiny, _, hidden_of_tiny = parameter_groups(tiny, "muon")
    shapes = {tuple(p.shape[:2]) for p in of_tiny if p.ndim >= 2}
    assert shapes == {(64, 3), (4, 64), (64, 4), (3, 64)}
    assert {tuple(p.shape[:2]) for p in hidden_of_tiny} == {(64, 64)}
    of_ends = [f"conv_{layer}.{kind}" for layer in ("norm_out", "out") for kind in ("weight", "bias")]
    expected = {f"{network}.{name}" for network in ("encoder", "decoder") for name in of_ends}
    assert {names[id(parameter)] for parameter in ends} == expected


def test_optimizers_of_a_run():
    model = AutoencoderKL(ModelConfig(channels=(8, 16), layers_per_block=1, norm_groups=4))
    model.freeze_encoder()
    adamw = build_optimizers(model, None, OptimConfig(), LossConfig()).autoencoder
    assert type(adamw) is torch.optim.AdamW
    of_run = build_optimizers(model, torch.nn.Linear(2, 2), OptimConfig(optimizer="muon"), LossConfig())
    muon = of_run.autoencoder
    assert type(muon) is Muon
    assert type(of_run.discriminator) is torch.optim.AdamW  # as in VQGAN, Muon trains the autoencoder alone
    parameters = [parameter for group in muon.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in parameters} == {
        id(parameter) for parameter in model.parameters() if parameter.requires_grad
    }


def test_products_are_in_full_fp32_and_the_setting_of_the_run_stays(monkeypatch):
    found = []
    original = optimizers._orthogonalized

    def observed(*arguments):
        found.append(torch.get_float32_matmul_precision())
        return original(*arguments)

    monkeypatch.setattr(optimizers, "_orthogonalized", observed)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        weights = weights_of(torch.channels_last)
        set_gradients(weights, 1)
        muon_of(weights).step()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(found) == {"highest"}


def test_gradient_of_zero_changes_no_weight():
    weight = torch.nn.Parameter(torch.ones(4, 6))
    weight.grad = torch.zeros(4, 6)
    Muon([], [], [weight], LEARNING_RATE, BETAS, 0.0).step()
    assert torch.equal(weight, torch.ones(4, 6))
