"""Precision, memory layout and compilation change only rounding; kernels are tested with a run's shapes."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.harness.runs import TINY
from tests.harness.toy_networks import NO_LPIPS, gradients, relative_difference, toy_networks
from tests.harness.training_runs import last_checkpoint, records, train_short
from vae.config.model_options import ModelConfig
from vae.config.options import RECOMPUTE, Config, SpeedConfig
from vae.config.resolve import resolve
from vae.losses import feature_distance
from vae.losses.terms import build_terms
from vae.memory.plan import StepSpec, stage_spec, zero_inputs
from vae.model.activation_scale import LargestActivation
from vae.model.autoencoder import AutoencoderKL, set_recompute
from vae.model.discriminator import Discriminator
from vae.model.layers import Attention
from vae.ops import attention, norm
from vae.step import Networks, compute_gradients
from vae.system.errors import UserError
from vae.training import setup
from vae.training.precision import compile_in_place, compute_dtype, kernel_shapes

MODEL = ModelConfig(channels=(8, 16), layers_per_block=2, norm_groups=4, z_channels=4)
CPU = torch.device("cpu")


@pytest.fixture
def _fresh_compiler():
    config = torch._dynamo.config
    names = ("recompile_limit", "optimize_ddp")
    with config.patch({name: getattr(config, name) for name in names}):  # restores the values afterwards
        yield
    torch._dynamo.reset()


# --- the compute dtype ----------------------------------------------------------------------------------


def test_the_largest_activation_of_all_processes_decides(monkeypatch):
    """A mean over them would hide the one process whose crops overflow."""
    monkeypatch.setattr(setup, "activations_of", lambda _model, _crops: LargestActivation(10.0, "mine"))
    dist = SimpleNamespace(all_gather_set=lambda items: items | {(6e4, "theirs"), (2.0, "others")})
    run = SimpleNamespace(dist=dist, crops=lambda _count: (), state=SimpleNamespace(eval_model=None))
    assert setup._largest_activation(run) == LargestActivation(6e4, "theirs")


def test_compute_dtype_on_gpus_with_and_without_bf16(monkeypatch):
    # There is no such GPU here: only the answers of its driver are replaced.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Tesla T4")
    gpu = torch.device("cuda", 0)
    assert compute_dtype(SpeedConfig(mixed_precision=True), gpu) == torch.float16
    with pytest.raises(UserError, match=r"--use_bf16: Tesla T4 .*--mixed_precision"):
        compute_dtype(SpeedConfig(mixed_precision=True, use_bf16=True), gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (12, 0))
    assert compute_dtype(SpeedConfig(mixed_precision=True), gpu) == torch.float16
    assert compute_dtype(SpeedConfig(use_bf16=True), gpu) == torch.bfloat16


# --- runs -----------------------------------------------------------------------------------------------


def losses(given: dict, folder, **changes) -> list[float]:
    """The loss of each step of a short run."""
    train_short(given, folder, **changes)
    return [record["loss"] for record in records(folder, "train")]


@pytest.mark.slow
@pytest.mark.usefixtures("computes_fp16")
def test_losses_in_half_precision_are_near_those_in_fp32(tiny, tmp_path):
    found = {
        flag: losses(tiny, tmp_path / flag, **{flag: True})
        for flag in ("enable_tf32", "mixed_precision", "use_bf16")
    }
    fp32, fp16, bf16 = (torch.tensor(values) for values in found.values())
    assert 0 < (fp16 - fp32).abs().max() < 0.5 * (bf16 - fp32).abs().max()
    torch.testing.assert_close(bf16, fp32, rtol=0.02, atol=0)  # bf16 has 8 bits
    assert last_checkpoint(tmp_path / "mixed_precision")["fp16"]


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_networks_have_the_same_losses(tiny, tmp_path, capsys):
    expected = losses(tiny, tmp_path / "eager")
    capsys.readouterr()
    found = losses(tiny, tmp_path / "compiled", use_torch_compile=True)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("device ")]
    assert line.endswith("compiled")
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_training_goes_on_without_compiling_where_it_fails(tiny, tmp_path, monkeypatch, capsys):
    cache = tmp_path / "cache"
    cache.touch()  # a file instead of a folder
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    assert len(losses(tiny, tmp_path / "run", use_torch_compile=True)) > 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "--use_torch_compile" in line]
    assert str(cache) in line


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("groups", [8, 0])
def test_copy_of_a_compiled_network_has_its_own_weights(groups):
    network = Attention(16, groups)
    compile_in_place(network)
    copied = copy.deepcopy(network)
    images = torch.randn(1, 16, 4, 4)
    expected = copied(images)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1)
    assert torch.equal(copied(images), expected)


# --- what compiled networks save for backward -----------------------------------------------------------


def saved_bytes_and_gradients(level: str, compiled: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes that forward saves for backward at a recompute level, and the gradients of the network."""
    network = toy_networks(torch.float32, loss=NO_LPIPS, discriminator=False, model=MODEL).autoencoder
    set_recompute(network, level)
    if compiled:  # partitions forward and backward like inductor, but generates no code
        compile_in_place(network, backend="aot_eager_decomp_partition")
    generator = torch.Generator().manual_seed(0)
    images, noise = (torch.randn(1, c, s, s, generator=generator) for c, s in ((3, 32), (4, 16)))
    inputs = {t.untyped_storage().data_ptr() for t in [images, noise, *network.parameters()]}
    saved: dict[int, int] = {}

    @torch.compiler.disable
    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in inputs:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    # encoder and decoder have attentions of one shape: nothing may be compiled twice
    no_recompiles = torch._dynamo.config.patch(error_on_recompile=True)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), no_recompiles:
        recon, mean, logvar = network(images, noise)
        loss = recon.abs().mean() + mean.square().mean() + logvar.square().mean()
    loss.backward()
    return sum(saved.values()), gradients(network)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("level", [RECOMPUTE[0], RECOMPUTE[-1]])
def test_compiled_network_saves_no_more_than_the_eager_one(level):
    saved, expected = saved_bytes_and_gradients(level, compiled=False)
    saved_compiled, found = saved_bytes_and_gradients(level, compiled=True)
    assert saved_compiled <= 1.02 * saved
    assert relative_difference(found, expected) < 1e-5


# ---- Shapes of kernels -----------------------------------------------------------------------------------


OPTIONS = {**TINY, "perceptual_weight": 1.0, "perceptual_net": "random", "channels": (8, 16, 24)}
ADVERSARIAL = {"adversarial_weight": 0.5, "disc_channels": 8, "disc_layers": 2}


WAN = ModelConfig(
    family="wan",
    channels=(8, 16, 24),
    layers_per_block=1,
    z_channels=4,
    use_quant_conv=True,
    latent_norm=True,
)


def spec_of(config: Config) -> StepSpec:
    return stage_spec(config, config.data.image_size, 1, torch.float32, 0)


@pytest.mark.parametrize("more", [{}, ADVERSARIAL, {"family": "wan"}], ids=["plain", "adversarial", "wan"])
def test_shapes_are_those_of_a_real_step(more, monkeypatch):
    """What the operations choose their kernels for, on a CPU."""
    config = resolve({**OPTIONS, **more}, None, None, {})
    if config.model.family == "wan":
        config = replace(config, model=WAN)
    found = set()

    def spy(module, shape_of):
        right = module.backend
        monkeypatch.setattr(module, "backend", lambda *h: found.add(shape_of(*h)) or right(*h))

    spy(norm, lambda h, norm=None: ("norm" if norm is None or norm.groups else "rms_norm", *h.shape[1:]))
    spy(attention, lambda q: ("attention", *q.shape[1:]))
    spy(feature_distance, lambda h: ("feature_distance", *h.shape[1:]))
    loss, dtype = config.loss, torch.float32
    discriminator = None
    if loss.adversarial_weight:
        discriminator = Discriminator(loss.disc_channels, loss.disc_layers)
    terms = build_terms(loss, dtype, "cpu")
    networks = Networks(AutoencoderKL(config.model), discriminator, terms, dtype, channels_last=True)
    compute_gradients(networks, zero_inputs(spec_of(config), 1, "cpu"), [1])
    planned = {(shape.operation, *shape[:3]) for shape in kernel_shapes([spec_of(config)])}
    if config.model.family == "wan":  # the sum at the end of a block is tested at other sizes only
        found = {shape for shape in found if shape[0] != "norm"}
    assert planned == found
