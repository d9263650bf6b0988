"""A command of infer_vae.py: load the VAE, then process the tasks one by one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from vae.config.trained_vae_flags import InferConfig
from vae.device import DTYPES, is_out_of_memory, pick_device, precision_support, warn_of_slow_bf16
from vae.images.channels import hide_colors, to_pil
from vae.images.decoding import decode_image
from vae.images.formats import BadImageError, check_longest_side
from vae.images.pixels import to_float, to_uint8
from vae.inference.codec import (
    LEAST_SHARE,
    MIN_SIDE,
    attention_seconds,
    check_main_memory,
    decode_latents,
    encode_images,
)
from vae.inference.latent_file import (
    BadLatentsError,
    Latents,
    LatentSource,
    encoder_fingerprint,
    load_latents,
    save_latents,
)
from vae.inference.tasks import COMMAND, LATENTS, Task
from vae.interop.latent_statistics import LatentSums, norm_constants
from vae.interop.vae_files import load_vae
from vae.model.activation_scale import UNKNOWN, scale_activations
from vae.model.autoencoder import AutoencoderKL
from vae.ops.kernel_check import choose_kernels
from vae.ops.noise import keyed_normal
from vae.progress import Progress, track
from vae.system import console
from vae.system.errors import EXIT_DATA
from vae.system.files import atomic_path, claim_folder

MEASURED_IMAGES = 64  # from which a scaling is measured
MAX_ATTENTION_SECONDS = 120.0  # of one network over a whole image: --tiles auto computes slower ones in tiles


class TooSlowError(Exception):
    """A whole image would take very long."""


@dataclass
class Session:
    """A loaded VAE and its settings."""

    config: InferConfig
    model: AutoencoderKL
    source: LatentSource
    dtype: torch.dtype
    tile: int | None  # the side of the tiles of the next image; None: it is computed whole
    has_own_latents: bool  # a checkpoint of a run that changes its latents, and measures them at its end

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def headline(self) -> str:
        """One line about the VAE and the settings."""
        config = self.model.config
        names = {dtype: name for name, dtype in DTYPES.items()}
        enlarged = "" if config.up_scale == 1 else f", decoded at {config.up_scale} times the size"
        tiles = "" if self.tile is None else f", blended tiles of {self.tile} px"
        return (
            f"{self.config.vae}: {config.z_channels} latent channels, "
            f"{self.model.encoder_downsampling}x downsampling{enlarged}; "
            f"{names[self.dtype]} on {self.device.type}{tiles}"
        )

    def encode(self, images: torch.Tensor) -> Latents:
        """Latents of images (1, C, H, W) in [-1, 1]; MemoryError if what follows does not fit either.

        If they are decoded next, the encoder reads the images at the size that gives images of their size.
        """
        alone = self.config.mode == "encode"
        pixels = images[:, 0].numel() // (1 if alone else self.model.config.up_scale**2)
        for operation in ("encode",) if alone else ("encode", "decode"):
            self._check_cost(operation, pixels)
        with _tile_progress("encode") as on_step:
            posterior = encode_images(
                self.model, images, dtype=self.dtype, tile=self.tile, at_full_size=alone, on_step=on_step
            )
        if self._leaves_fp16(posterior.mean):
            return self.encode(images)
        self._check_finite(posterior.mean)
        return Latents(posterior, (images.shape[2], images.shape[3]))

    def decode(self, latents: torch.Tensor, size: tuple[int, int]) -> np.ndarray:
        """uint8 (H, W, C) pixels of latents (1, Z, h, w). BadImageError if --format cannot store them."""
        check_longest_side(max(size), self.config.format)
        self._check_cost("decode", latents[:, 0].numel() * self.model.encoder_downsampling**2)
        with _tile_progress("decode") as on_step:
            images = decode_latents(
                self.model, latents, size, dtype=self.dtype, tile=self.tile, on_step=on_step
            )
        if self._leaves_fp16(images):
            return self.decode(latents, size)
        self._check_finite(images)
        return hide_colors(to_uint8(images[0]).permute(1, 2, 0).cpu().numpy())

    def _check_cost(self, operation: str, pixels: int) -> None:
        """Raise MemoryError if the main memory is too small, and also if it may be and tiles are allowed.

        TooSlowError if tiles are allowed and much faster; if they are not, the time is printed.
        """
        share = 1.0 if self.config.tiles == "off" else LEAST_SHARE
        check_main_memory(self.model, operation, pixels, self.dtype, self.tile, share)
        if self.tile is not None:
            return
        seconds = attention_seconds(self.model, operation, pixels, self.dtype)
        if seconds > MAX_ATTENTION_SECONDS:
            text = f"takes about {seconds / 60:.0f} minutes to {operation} as a whole"
            if self.config.tiles == "auto":
                raise TooSlowError(text)
            console.info(
                f"an image of {pixels / 1e6:.1f} megapixels {text}; --tiles auto computes it in tiles"
            )

    def _leaves_fp16(self, values: torch.Tensor) -> bool:
        """Whether the network overflows fp16, which --dtype auto took: it computes in fp32 from here on."""
        if self.config.dtype != "auto" or self.dtype != torch.float16 or values.isfinite().all():
            return False
        self.dtype = torch.float32
        choose_kernels(self.config.kernels, self.device, [self.dtype])
        console.warning("the activations overflow fp16: --dtype auto continues in fp32")
        return True

    def _check_finite(self, values: torch.Tensor) -> None:
        if not torch.isfinite(values).all():
            remedy = "add --dtype fp32" if self.dtype != torch.float32 else "give another --vae"
            raise BadLatentsError("not_finite", f"the network returned NaN or infinity: {remedy}")

    def read(self, path: Path) -> Latents:
        """Latents of a latent file or of an image file, with the size of the decoded image."""
        if path.suffix.lower() != LATENTS:
            return self.encode_file(path)
        latents = load_latents(path, self.source, self.config.any_vae)
        height, width = (side * self.model.config.up_scale for side in latents.size)
        return Latents(latents.posterior, (height, width))

    def encode_file(self, path: Path) -> Latents:
        """Latents of an image file. Raises BadImageError."""
        return self.encode(read_image(path, self.config, self.model.config.image_channels))


def open_session(config: InferConfig) -> Session:
    """Load --vae onto --device. Raises UserError if the device or the VAE is not available."""
    device = pick_device(config.device)
    needs = {"encode": ("encoder",), "decode": ("decoder",)}.get(config.mode, ("encoder", "decoder"))
    loaded = load_vae(Path(config.vae), flag="--vae", weights=config.weights, needs=needs)
    model = loaded.autoencoder
    if not loaded.has_encoder:
        console.warning(f"--vae {config.vae} has no encoder: whether it made the latents is not checked")
    constants, of_norm = loaded.file.constants, norm_constants(model.bn)
    if of_norm.mean:
        constants = constants._replace(mean=of_norm.mean, std=of_norm.std)
    fingerprint = encoder_fingerprint(model) if loaded.has_encoder else ""
    source = LatentSource(fingerprint, model.config.z_channels, model.encoder_downsampling, constants)
    model.to(device).to(memory_format=torch.channels_last)
    torch.backends.cudnn.allow_tf32 = False  # --dtype fp32 means fp32, not TF32
    dtype = _dtype(config.dtype, device)
    scale_activations(model, UNKNOWN if dtype == torch.float16 else 1.0)
    choose_kernels(config.kernels, device, [dtype])
    tile = config.tile_size if config.tiles == "blended" else None
    return Session(config, model, source, dtype, tile, loaded.file.encoder_trained)


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


def _dtype(name: str, device: torch.device) -> torch.dtype:
    support = precision_support(device)
    if name == "auto":
        name = "fp16" if support.is_gpu else "fp32"
    warn_of_slow_bf16(name, support)
    return DTYPES[name]


def infer(config: InferConfig, tasks: list[Task]) -> int:
    """Do the tasks of `plan_tasks(config)`; returns the exit code. A bad file does not stop the others."""
    session = open_session(config)
    console.info(session.headline)
    claim_folder(Path(config.output_dir), COMMAND)
    if config.mode == "encode" and not session.source.constants.is_known and session.model.bn is None:
        _find_scaling(session, tasks)
    failed = 0
    for task in track(tasks, config.mode, len(tasks), "file"):
        reason = _attempt(session, task, _WORK[config.mode])
        if reason is not None:
            failed += 1
            console.error(f"{task.name}: {reason}")
    failures = f", {failed} failed" if failed else ""
    results = f"; results are in {config.output_dir}" if failed < len(tasks) else ""
    console.info(f"{config.mode}: {len(tasks) - failed} of {len(tasks)} done{failures}{results}")
    return EXIT_DATA if failed else 0


def _find_scaling(session: Session, tasks: list[Task]) -> None:
    """Measure the scaling of latents that a run still changes; warn if other latents have none."""
    vae = f"--vae {session.config.vae}"
    if not session.has_own_latents:
        console.warning(
            f"{vae} does not contain the scaling of its latents, so neither do the results: export it with "
            "--scaling_factor first, or give the folder vae/ of its model"
        )
        return
    sums = LatentSums()

    def add(session: Session, task: Task) -> None:
        posterior = session.encode_file(task.inputs[0]).posterior
        sums.add(posterior.mean, posterior.logvar)

    chosen = tasks[:: max(1, len(tasks) // MEASURED_IMAGES)][:MEASURED_IMAGES]
    for task in track(chosen, "scaling", len(chosen), "file", keep=False):
        _attempt(session, task, add)
    if sums.count:
        measured = sums.statistics()
        constants = session.source.constants._replace(scaling=measured.scaling, shift=measured.shift)
        session.source = replace(session.source, constants=constants)
        console.warning(
            f"{vae} does not contain the scaling of its latents yet, so that of these images is taken: "
            f"{measured.scaling:.5g}, shift {measured.shift:.5g}; export_vae.py --data_path fixes one in a "
            "VAE"
        )


def _attempt(session: Session, task: Task, work: Callable[[Session, Task], None]) -> str | None:
    """Do one task; returns the reason if it cannot be done."""
    try:
        work(session, task)
    except (BadImageError, BadLatentsError) as error:
        return str(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        needed = f" ({error})" if isinstance(error, MemoryError) and str(error) else ""
        problem = f"does not fit into memory on {session.device.type}{needed}"
    except TooSlowError as error:
        problem = f"{error} on {session.device.type}"
    else:
        return None
    if session.config.tiles == "auto" and session.tile is None:
        console.warning(f"{task.name} {problem}: computes it in blended tiles, which are approximate")
        session.tile = session.config.tile_size
        reason = _attempt(session, task, work)
        session.tile = None  # the next images may fit
        return reason
    return f"out_of_memory: {problem}: {_smaller_setting(session)}"


def _smaller_setting(session: Session) -> str:
    """The remedy if a command has run out of memory."""
    if session.config.tiles == "off":
        return "use --tiles blended"
    return "lower --tile_size" if session.device.type == "cuda" else "add --dtype bf16, or shrink the image"


def _encode(session: Session, task: Task) -> None:
    path = task.inputs[0]
    latents = session.encode_file(path)
    save_latents(task.outputs[0], latents, session.source, path.name)


def _decode(session: Session, task: Task) -> None:
    latents = session.read(task.inputs[0])
    write_image(task.outputs[0], session.decode(latents.posterior.mode(), latents.size))


def _interpolate(session: Session, task: Task) -> None:
    """A straight line between two modes: latents of these VAEs are near their mean, not on a sphere."""
    start, end = (session.read(path) for path in task.inputs)
    if start.size != end.size:
        sizes = " and ".join(f"{width}x{height}" for height, width in (start.size, end.size))
        raise BadLatentsError("sizes_differ", f"{sizes} px: resize both to the same size first")
    for weight, output in zip(torch.linspace(0, 1, len(task.outputs)), task.outputs, strict=True):
        latents = torch.lerp(start.posterior.mode(), end.posterior.mode(), weight)
        write_image(output, session.decode(latents, start.size))


def _vary(session: Session, task: Task) -> None:
    """Samples whose noise depends only on (seed, index, name), not on the order of the files."""
    config = session.config
    latents = session.read(task.inputs[0])
    mean = latents.posterior.mean
    for index, output in enumerate(task.outputs):
        noise = keyed_normal(mean.shape, config.seed, index, task.name).to(mean.device)
        sample = latents.posterior.sample(noise * config.noise_scale)
        write_image(output, session.decode(sample, latents.size))


_WORK = {
    "reconstruct": _decode,
    "encode": _encode,
    "decode": _decode,
    "interpolate": _interpolate,
    "variations": _vary,
}


# ---- Image files -----------------------------------------------------------------------------------------


def read_image(path: Path, config: InferConfig, channels: int) -> torch.Tensor:
    """fp32 (1, C, H, W) in [-1, 1] of an image file, upright and in sRGB. Raises BadImageError."""
    background = config.background
    pixels = decode_image(path, max_pixels=config.max_pixels, background=background, channels=channels)
    height, width = pixels.shape[:2]
    if min(height, width) < MIN_SIDE:
        raise BadImageError("too_small", f"{width}x{height} px; each side needs at least {MIN_SIDE} px")
    return to_float(torch.from_numpy(pixels).permute(2, 0, 1)[None])


def write_image(path: Path, pixels: np.ndarray) -> None:
    """Write uint8 (H, W, C) or grey (H, W) pixels as .png or lossless .webp, atomically."""
    with atomic_path(path) as temporary:
        # PNG ignores both; exact: WebP keeps the colors of pixels with alpha 0
        to_pil(np.atleast_3d(pixels)).save(temporary, path.suffix[1:], lossless=True, exact=True)
