"""Autoencoders that diffusers computes: one adapter for all of its classes in DIFFUSERS_CLASSES.

It knows how a module of diffusers encodes and decodes, and whether its tensors are those of images or of
videos of one frame. All other modules see an AutoencoderKL, whose weights have diffusers' names.

The module computes in the dtype of its input, as `module.to(dtype)` does, but casts the fp32 weights layer by
layer: autocast does not exist on the meta device, where memory is counted, and would compute the linear
attention of AutoencoderDC, which diffusers keeps in fp32, in bf16.

Shapes: B images, C channels, H x W pixels, f downsampling, Z latent channels.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vae.config.declare import OptionValues
from vae.config.model_options import DIFFUSERS_CLASSES, ModelConfig
from vae.model.autoencoder import AutoencoderKL, RecomputeLevel, Sampling
from vae.model.tiny import LOGVAR_RANGE
from vae.ops.shapes import AnyImages, Latents, Moments
from vae.system.errors import UserError

DECODING = ("decoder.", "post_quant_conv.")  # names of the weights that produce no latents
PROBE_PX = 256  # side of the image that shows the shape of a network


class DiffusersAutoencoder(AutoencoderKL):
    """A module of diffusers as an AutoencoderKL; it is always in evaluation mode (batch norms, dropout)."""

    has_torch_layers = True
    network: Any

    def __init__(self, config: ModelConfig):
        nn.Module.__init__(self)
        assert config.module is not None
        self.config = config
        self.bn = None
        self.encoder_frozen = False
        network = build_network(config.module)
        unused = shape_of(config.module).unused
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name not in unused)
        _prepare(network)
        # Both have the same children, parameters and buffers, so names are diffusers' own.
        self.__dict__.update(
            network=network,
            sampling=Sampling(),
            _modules=network._modules,
            _parameters=network._parameters,
            _buffers=network._buffers,
            _non_persistent_buffers_set=network._non_persistent_buffers_set,
        )
        self._class = DIFFUSERS_CLASSES[config.class_name]

    def _moments(self, images: AnyImages) -> Moments:
        encoded = self._compute(self.network.encode, images)
        moments = encoded if isinstance(encoded, torch.Tensor) else encoded.parameters
        moments = moments.squeeze(2) if self._class.is_video else moments  # (B, Z or 2Z, H/f, W/f)
        if self._class.has_posterior:
            return moments
        return torch.cat([moments, torch.full_like(moments, LOGVAR_RANGE[0])], dim=1)

    def decode(self, latents: Latents) -> AnyImages:
        """Images (B, C, H, W) in the dtype of `latents`, in about [-1, 1]; some classes clamp them."""
        images = self._compute(self.network.decode, latents)
        return images.squeeze(2) if self._class.is_video else images

    def _compute(self, method: Callable[..., Any], inputs: torch.Tensor) -> Any:
        """The first result of `method`; UserError if the device lacks an operation of it in this dtype."""
        try:
            return method(inputs.unsqueeze(2) if self._class.is_video else inputs)[0]
        except NotImplementedError as error:
            if inputs.dtype == torch.float32:
                raise
            where = f"{inputs.dtype} on the {inputs.device.type}"
            raise UserError(
                f"{self.config.class_name} cannot compute in {where} ({error}): train with "
                "--no-mixed_precision --no-use_bf16, or give --dtype fp32"
            ) from None

    def freeze_encoder(self) -> None:
        """Train only the decoder: freeze everything that produces latents and run it without a graph."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name.startswith(DECODING))
        self.encoder_frozen = True

    def set_recompute(self, level: RecomputeLevel) -> None:
        """Checkpoint parts of the network: few classes of diffusers can by themselves."""
        self.network.encoder.checkpointed = level.encoder
        for stage in _stages(self.network):
            blocks = _blocks(stage)
            stage.checkpointed = level.every_resolution
            for block in blocks or [stage]:
                block.checkpointed = level.full_resolution or level.resnets == "block"

    def train(self, mode: bool = True) -> "DiffusersAutoencoder":
        """Stay in evaluation mode: statistics of batches and noise would couple and change images."""
        return super().train(False)

    def to(self, *args: Any, **kwargs: Any) -> "DiffusersAutoencoder":
        """As of every module; a memory layout of images is that of the weights of images only."""
        layout = kwargs.pop("memory_format", None)
        super().to(*args, **kwargs)
        for parameter in self.parameters():
            if layout is not None and parameter.dim() == 4:
                parameter.data = parameter.data.contiguous(memory_format=layout)
        return self


# ---- Modules of diffusers --------------------------------------------------------------------------------


def build_network(module: str) -> Any:
    """The module of diffusers with this configuration as JSON, on the default device, with random weights.

    Raises UserError if diffusers is missing or too old. Errors of the module's code are its own.
    """
    config = json.loads(module)
    name = config["_class_name"]
    try:
        import diffusers
    except ImportError:
        raise UserError(f"{name} is computed by diffusers, which is missing: pip install diffusers") from None
    with torch.device("cpu"):  # it imports the class now, and some modules begin with tensors
        cls = getattr(diffusers, name, None)
    if cls is None:
        raise UserError(f"diffusers {diffusers.__version__} has no {name}: pip install --upgrade diffusers")
    network = cls.from_config(config).to(torch.get_default_device())  # on meta, some buffers are not
    if hasattr(network, "clear_cache"):
        network.clear_cache = MethodType(_without_cache, network)
    part: Any
    for part in network.modules():
        if "Temporal" in type(getattr(part, "processor", None)).__name__:
            part.processor = _attend_to_one_frame
    return network.eval()


def _without_cache(network: Any) -> None:
    """Let a video network compute one frame: it then needs no copies of features for the next one."""
    type(network).clear_cache(network)
    for name in ("_feat_map", "_enc_feat_map"):
        setattr(network, name, None)


def _attend_to_one_frame(attention: Any, hidden_states: torch.Tensor, **_mask: Any) -> torch.Tensor:
    """Attention over time, exactly: of one frame it returns the values.

    PyTorch's kernel takes half a megabyte per pixel of the features for its backward.
    """
    return attention.to_out[0](attention.to_v(attention.norm(hidden_states))) + hidden_states


@dataclass(frozen=True)
class NetworkShape:
    """What a module of diffusers computes of an image."""

    channels: tuple[int, ...]  # of each resolution, from the image to the latents
    z_channels: int
    unused: frozenset[str]  # parameters that no image needs: those of later frames


@lru_cache(maxsize=8)
def shape_of(config: str) -> NetworkShape:
    """The shape of a module, found by a step on the meta device; any error of its code if it cannot."""
    facts = DIFFUSERS_CLASSES[json.loads(config)["_class_name"]]
    with torch.device("meta"):
        network = build_network(config)
        images = torch.zeros(1, 3, PROBE_PX, PROBE_PX)
    widths: dict[int, int] = {}

    def note(convolution: Any, _inputs: Any, features: torch.Tensor) -> None:
        level = (PROBE_PX // features.shape[-1]).bit_length() - 1
        width = min(convolution.weight.shape[:2])  # blocks have wider layers within
        widths[level] = max(widths.get(level, 0), width)

    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            module.register_forward_hook(note)
    with torch.enable_grad():
        encoded = network.encode(images.unsqueeze(2) if facts.is_video else images)[0]
        latents = encoded if isinstance(encoded, torch.Tensor) else encoded.mode()
        recon = network.decode(latents)[0]
        recon.sum().backward()
    factor = PROBE_PX // latents.shape[-1]
    if recon.numel() != images.numel() or factor.bit_count() != 1:
        raise ValueError(f"images of {tuple(images.shape)} become {tuple(recon.shape)}")
    unused = (name for name, p in network.named_parameters() if p.requires_grad and p.grad is None)
    channels = tuple(widths.get(level, images.shape[1]) for level in range(factor.bit_length()))
    return NetworkShape(channels, latents.shape[1], frozenset(unused))


def build_autoencoder(model: ModelConfig) -> AutoencoderKL:
    """The network of `model`, on the default device: our own or one of diffusers."""
    return DiffusersAutoencoder(model) if model.module else AutoencoderKL(model)


# Constants of latents in a configuration, which change no network: LatentConstants of the file has them.
CONSTANTS = ("scaling_factor", "latents_mean", "latents_std")


def model_values(config: dict[str, Any]) -> tuple[OptionValues, dict[str, Any]]:
    """ModelConfig values of the network with this content of config.json, and the constants of its latents.

    Raises the errors of `build_network`, and any error of the module's code for a wrong value.
    """
    with torch.device("meta"):
        complete = dict(build_network(json.dumps(config)).config)
    complete = {name: value for name, value in complete.items() if not name.startswith("_")}
    complete["_class_name"] = config["_class_name"]
    constants = {name: complete[name] for name in CONSTANTS if name in complete}
    module = json.dumps({**complete, **dict.fromkeys(constants)}, sort_keys=True)
    constants = constants or {"scaling_factor": 1.0}  # a class without any: its latents are used as they are
    shape = shape_of(module)
    if len(constants.get("latents_mean") or ()) not in (0, shape.z_channels):
        # Those of Cosmos are of several frames of each channel, and stay
        constants = {"scaling_factor": complete["scaling_factor"]}
        module = json.dumps({**complete, "scaling_factor": None}, sort_keys=True)
    values = {
        "family": "diffusers",
        "module": module,
        "channels": shape.channels,
        "z_channels": shape.z_channels,
        "mid_attention": False,
        "use_quant_conv": False,
        "latent_norm": False,
    }
    return values, constants


# ---- What the forward of its parts does in addition ------------------------------------------------------


def _prepare(network: Any) -> None:
    """Let parts of the network cast their weights, and repeat themselves in backward if `checkpointed`."""
    parts = {network.encoder, *(stage for stage in _stages(network))}
    parts |= {block for stage in _stages(network) for block in _blocks(stage)}
    module: Any
    for module in network.modules():
        has_weights = any(weight is not None for weight in module._parameters.values())
        casts = has_weights and not isinstance(module, nn.BatchNorm2d)  # it takes fp32 weights in any dtype
        if module in parts or (casts and module is not network):
            module.checkpointed = False
            # A bound method: a copy of the network binds it to its own module
            module.forward = MethodType(_forward, module)


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    if module.checkpointed and torch.is_grad_enabled():
        # As maybe_checkpoint of vae.model.layers
        kwargs |= {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(_in_dtype_of_input, module, *args, **kwargs)
    return _in_dtype_of_input(module, *args, **kwargs)


def _in_dtype_of_input(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of the module's class with its own weights in the dtype of its first tensor."""
    own = module._parameters
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    dtype = next(tensors).dtype
    if all(weight is None or weight.dtype == dtype for weight in own.values()):
        return type(module).forward(module, *args, **kwargs)
    cast = {name: None if weight is None else weight.to(dtype) for name, weight in own.items()}
    module.__dict__["_parameters"] = cast
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        module.__dict__["_parameters"] = own


def _stages(network: Any) -> list[Any]:
    """The largest parts of encoder and decoder that are in lists."""
    return [part for half in (network.encoder, network.decoder) for part in _in_lists(half)]


def _blocks(stage: Any) -> list[Any]:
    """The largest parts of a stage that are in lists, without single layers; none: it is a block itself."""
    return [part for part in _in_lists(stage) if len([*part.parameters()]) > 2]


def _in_lists(module: nn.Module) -> Iterator[Any]:
    for child in [module] if isinstance(module, nn.Sequential) else module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (part for part in child if part is not None)  # Cosmos has lists with None
        else:
            yield from _in_lists(child)
