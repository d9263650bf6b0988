"""A loaded VAE with its device, dtype and tile size: image files and latent files in, pixels out."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vae.config.infer_flags import InferConfig
from vae.device import DTYPES, pick_device, precision_support, warn_of_slow_bf16
from vae.images.pixels import to_uint8
from vae.inference.codec import check_main_memory, decode_latents, encode_images
from vae.inference.image_files import read_image
from vae.inference.latent_file import (
    BadLatentsError,
    Latents,
    LatentSource,
    encoder_fingerprint,
    load_latents,
)
from vae.inference.tasks import LATENTS
from vae.interop.families import latents_config
from vae.interop.vae_files import load_vae
from vae.model.autoencoder import AutoencoderKL
from vae.ops.kernel_check import choose_kernels
from vae.progress import Progress
from vae.system import console

MAX_WHOLE_PIXELS = 2**20  # on a CPU, where tiles cost no time: above, they need less memory and show progress


@dataclass
class Session:
    """A loaded VAE and its settings."""

    config: InferConfig
    model: AutoencoderKL
    source: LatentSource
    dtype: torch.dtype
    tiles: str = "auto"  # the --tiles of the next images
    used: str = "off"  # the --tiles of the image before

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def tiling(self, pixels: int) -> dict[str, Any]:
        """How an image of so many pixels is computed: `tile` and `blended` of vae.inference.codec."""
        self.used = self.tiles
        if self.tiles == "auto":
            self.used = "exact" if self.device.type == "cpu" and pixels > MAX_WHOLE_PIXELS else "off"
        tile = None if self.used == "off" else self.config.tile_size
        return {"tile": tile, "blended": self.used == "blended"}

    def less_memory(self) -> str | None:
        """With --tiles auto, what needs less memory than the last image did; None if there is nothing."""
        if self.config.tiles != "auto":
            return None
        return {"off": "exact", "exact": "blended"}.get(self.used)

    @property
    def headline(self) -> str:
        """One line about the VAE and the settings."""
        config = self.model.config
        names = {dtype: name for name, dtype in DTYPES.items()}
        kind = self.config.tiles
        tiles = f", {kind} tiles of {self.config.tile_size} px" if kind in ("exact", "blended") else ""
        return (
            f"{self.config.vae}: {config.z_channels} latent channels, "
            f"{self.model.downsampling}x downsampling; {names[self.dtype]} on {self.device.type}{tiles}"
        )

    def encode(self, images: torch.Tensor) -> Latents:
        """Latents of images (1, 3, H, W) in [-1, 1]; MemoryError if what follows does not fit either."""
        pixels = images[:, 0].numel()
        tiling = self.tiling(pixels)
        if self.config.mode != "encode":
            check_main_memory(self.model, "decode", pixels, self.dtype, **tiling)
        with _tile_progress("encode") as on_step:
            posterior = encode_images(self.model, images, dtype=self.dtype, on_step=on_step, **tiling)
        self._check_finite(posterior.mean)
        return Latents(posterior, (images.shape[2], images.shape[3]))

    def decode(self, latents: torch.Tensor, size: tuple[int, int]) -> np.ndarray:
        """uint8 (H, W, 3) pixels of latents (1, Z, h, w)."""
        tiling = self.tiling(size[0] * size[1])
        with _tile_progress("decode") as on_step:
            images = decode_latents(self.model, latents, size, dtype=self.dtype, on_step=on_step, **tiling)
        self._check_finite(images)
        return to_uint8(images[0]).permute(1, 2, 0).cpu().numpy()

    def _check_finite(self, values: torch.Tensor) -> None:
        if not torch.isfinite(values).all():
            remedy = "add --dtype fp32" if self.dtype != torch.float32 else "give another --vae"
            raise BadLatentsError("not_finite", f"the network returned NaN or infinity: {remedy}")

    def read(self, path: Path) -> Latents:
        """Latents of a latent file or of an image file."""
        if path.suffix.lower() == LATENTS:
            return load_latents(path, self.source, self.config.any_vae)
        return self.encode(read_image(path, self.config))


def open_session(config: InferConfig) -> Session:
    """Load --vae onto --device. Raises UserError if the device or the VAE is not available."""
    device = pick_device(config.device)
    needs = {"encode": ("encoder",), "decode": ("decoder",)}.get(config.mode, ("encoder", "decoder"))
    loaded = load_vae(Path(config.vae), flag="--vae", weights=config.weights, needs=needs)
    model = loaded.autoencoder
    if not loaded.has_encoder:
        console.warning(f"--vae {config.vae} has no encoder: whether it made the latents is not checked")
    source = LatentSource(
        encoder_fingerprint(model) if loaded.has_encoder else "",
        model.config.z_channels,
        model.downsampling,
        loaded.scaling_factor,
        loaded.shift_factor,
        **{name: tuple(values) for name, values in latents_config(model.bn).items()},
    )
    model.to(device).to(memory_format=torch.channels_last)
    torch.backends.cudnn.allow_tf32 = False  # --dtype fp32 means fp32, not TF32
    dtype = _dtype(config.dtype, device, loaded.file.force_upcast)
    choose_kernels(config.kernels, device, [dtype])
    return Session(config, model, source, dtype, config.tiles)


@contextmanager
def _tile_progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """Progress within an image, in percent, below that of the files; it appears with the first tile."""
    bars: list[Progress] = []
    with ExitStack() as stack:

        def on_step(done: int, total: int) -> None:
            if not bars:
                progress = Progress(description, total, "%", keep=False)
                bars.append(stack.enter_context(progress))
            bars[0].update(done - bars[0].done)

        yield on_step


def _dtype(name: str, device: torch.device, force_upcast: bool | None) -> torch.dtype:
    support = precision_support(device)
    if name == "auto" and support.is_gpu and force_upcast is False:
        name = "fp16"  # the file says that nothing overflows
    elif name == "auto":
        name = "bf16" if support.is_gpu and support.bf16 == "native" else "fp32"
    warn_of_slow_bf16(name, support)
    return DTYPES[name]
