"""Exporting a VAE: load, average, measure, fold, plan, write."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vae.config.declare import published_flags
from vae.config.model_options import ModelConfig
from vae.config.options import build
from vae.config.trained_vae_flags import CHANNELS, FOLDED_SCALING, ExportConfig
from vae.data.image_files import FolderImages, ImageSet
from vae.data.loading import load_validation
from vae.data.manifest import image_root, is_manifest, train_and_val
from vae.device import DTYPES, pick_device
from vae.images.folder import list_images
from vae.images.pixels import to_float
from vae.interop.averaging import combine
from vae.interop.early_checks import check_command
from vae.interop.families import DIFFUSERS_IMAGES, comfyui_problem
from vae.interop.latent_statistics import (
    LatentConstants,
    LatentStatistics,
    fold,
    folding_for,
    is_unmeasured,
    norm_constants,
    set_latent_norm,
    sums_of,
    with_quant_conv,
)
from vae.interop.model_card import README_NAME, measured_by_run, readme
from vae.interop.parameter_names import into_wan
from vae.interop.vae_files import PARTS, START_KEY, VaeFile, check_fit, load_vae, read_vae
from vae.interop.vae_path import locate_vae
from vae.interop.weight_file import read_tensors
from vae.interop.writing import (
    MODELSPEC,
    WritePlan,
    constants_text,
    kept_metadata,
    read_config,
    save_diffusers_folder,
    stored_weights,
    write_safetensors,
    write_tiny_decoder,
    write_vae,
)
from vae.model.activation_scale import largest_activation
from vae.model.autoencoder import AutoencoderKL
from vae.ops.kernel_check import choose_kernels
from vae.progress import track
from vae.system import console
from vae.system.errors import DataError, UserError
from vae.system.files import replace_text

FP16_IMAGES = 32  # images for the fp16 test: decoding takes most of the time
DEFAULT_IMAGE_SIZE = 256  # px


@dataclass(frozen=True)
class Crops:
    """Centre crops of a set of images."""

    images: ImageSet
    image_size: int
    channels: int = 3

    @classmethod
    def of(cls, path: str, config: ExportConfig, file: VaeFile, model: AutoencoderKL) -> "Crops":
        """The images at `path`, of a manifest its training images."""
        if is_manifest(path):
            names, _ = train_and_val(path, fold=None, val_split=0.0, seed=0)
        else:
            names = list_images(path)
        stride = max(1, len(names) // config.num_images) if config.num_images else 1
        names = names[::stride][: config.num_images or None]
        factor = model.encoder_downsampling
        size = config.image_size or file.sample_size or DEFAULT_IMAGE_SIZE
        if size % factor:
            raise UserError(
                f"--image_size {size} is not a multiple of {factor}: try {-(-size // factor) * factor}"
            )
        return cls(FolderImages(image_root(path), names), size, model.config.image_channels)

    def batches(self, limit: int | None = None) -> Iterator[torch.Tensor]:
        """Yield fp32 (1, C, S, S) in [-1, 1]; DataError if no image can be used."""
        num_yielded, rejected = 0, []
        for batch in load_validation(
            self.images,
            range(len(self.images)),
            image_size=self.image_size,
            batch_size=1,
            channels=self.channels,
        ):
            rejected += batch.rejected
            for image in batch.images:
                num_yielded += 1
                yield to_float(image[None])
            if num_yielded == limit:
                return
        if not num_yielded:
            reason = f": {rejected[0]}" if rejected else ""
            raise DataError(
                f"--data_path {self.images.location}: none of {len(self.images)} images gives a crop of "
                f"{self.image_size} px{reason}; lower --image_size or give other images"
            )


def export(config: ExportConfig) -> None:
    """Write the VAE as `config` specifies and print the results; after a UserError no file was written."""
    check_command(config)
    vaes = [load_vae(Path(path), weights=config.weights) for path in config.vae]
    loaded = combine(vaes, config) if len(vaes) > 1 else vaes[0]
    model = loaded.autoencoder
    _check_flags(model, config)
    needs_quant_conv = config.fold_scaling == CHANNELS and model.quant_conv is None
    if config.add_quant_conv or needs_quant_conv:
        model = with_quant_conv(model)
    constants = loaded.file.constants
    if config.scaling_factor is not None and not model.config.is_tiny:
        constants = constants._replace(scaling=config.scaling_factor, shift=config.shift_factor or 0.0)
    force_upcast = loaded.file.force_upcast is not False  # True if nothing is known
    device = pick_device(config.device)
    if config.data_path is not None:
        constants, force_upcast = _measure(model.to(device), config.data_path, config, loaded.file, constants)
    elif config.dtype == "fp16":
        console.warning("the activations were not tested for fp16: give images with --data_path to test them")
    output = Path(config.output)
    if config.into is not None:
        _write_into(Path(config.into), output, model, config.dtype)
        return
    needs_scaling = model.bn is None and not (config.is_single or model.config.decoder or model.config.module)
    if needs_scaling and constants.scaling is None:
        raise UserError(
            f"--vae {config.vae[0]} does not contain the scaling of its latents, which diffusers needs: give "
            f"that of its diffusion model ({published_flags()}), or --data_path to measure it if there is "
            "none yet"
        )
    plan = _plan(model, config, loaded.file, constants, force_upcast)
    content = (write_tiny_decoder if model.config.decoder else write_vae)(model, output, plan)
    if not config.is_single:
        is_validated = len(config.vae) == 1 and config.weights == "ema"  # no average, no raw weights
        measured = measured_by_run(Path(config.vae[0]), loaded.file.step) if is_validated else ""
        replace_text(output / README_NAME, [readme(output, content, config.license, measured)])
    _print_result(model.config, config, content)


def _print_result(model: ModelConfig, config: ExportConfig, content: Mapping[str, Any]) -> None:
    if model.padding != "zeros" and not model.decoder:
        console.warning(
            f"--padding {model.padding}: other programs pad with zeros, so borders differ there; "
            "docs/export.md has the lines that change it in diffusers"
        )
    has_scaling = content.get("scaling_factor") is not None and not model.is_tiny
    scaling = f", {constants_text(content)}" if has_scaling else ""
    console.info(f"written: {config.output} ({config.dtype}{scaling})")
    if images := DIFFUSERS_IMAGES.get(model.image_channels):
        console.info(
            f"images {images}, which diffusers' VaeImageProcessor makes from PIL images of this mode "
            "(docs/export.md)"
        )


def _check_flags(model: AutoencoderKL, config: ExportConfig) -> None:
    """Raise UserError for flags that have no effect on this network."""
    if config.fold_scaling and model.bn is not None:
        raise UserError(
            "--fold_scaling: this VAE's file contains the statistics of its latents: omit the flag"
        )
    unfit = ["fold_scaling", "into", "add_quant_conv"]
    is_combined = config.is_single and _taesd_half(config) is None
    kind = ""
    if model.config.module:
        kind = f"the {model.config.class_name} of diffusers, which is written as it is"
        is_combined = '"scaling_factor"' in model.config.module
    elif model.config.decoder:
        kind = "a tiny decoder, which is written alone"
    elif model.config.is_tiny:
        kind = "the latents of others"
    if model.config.decoder or not is_combined:  # no program reads a scaling there
        unfit.append("scaling_factor")
    if kind and (flags := [name for name in unfit if getattr(config, name)]):
        raise UserError(f"--{flags[0]}: --vae {config.vae[0]} has {kind}: omit it")


def _taesd_half(config: ExportConfig) -> str | None:
    """The half of an AutoencoderTiny that --output asks for by its name, as in taesd_decoder.safetensors."""
    return next((part for part in PARTS if Path(config.output).stem.endswith(f"_{part}")), None)


def _plan(
    model: AutoencoderKL, config: ExportConfig, file: VaeFile, constants: LatentConstants, force_upcast: bool
) -> WritePlan:
    """The format and the metadata of the result; warns of what ComfyUI misreads."""
    is_decoder = model.config.decoder is not None
    metadata = {} if is_decoder else kept_metadata(file.metadata)
    if file.start and config.fold_scaling is None and not is_decoder:  # folded weights have their own basis
        metadata[START_KEY] = file.start
    if config.license:
        metadata[f"{MODELSPEC}license"] = config.license
    if config.is_single and not is_decoder and (problem := comfyui_problem(model.config, constants)):
        console.warning(f"ComfyUI {problem}")
    half = _taesd_half(config)
    comfyui_scaling = None
    if model.config.is_tiny and config.is_single and half is None:
        if config.scaling_factor is not None:
            comfyui_scaling = config.scaling_factor, config.shift_factor or 0.0
        elif model.config.family == "tiny":  # latents of FLUX.2 are those of its diffusion model there too
            console.warning(
                "as a VAE in ComfyUI, this file needs the scaling of the diffusion model, whose latents are "
                f"not scaled there: {published_flags()}"
            )
    return WritePlan(
        file.sample_size or config.image_size or DEFAULT_IMAGE_SIZE,
        constants,
        title=Path(config.output).stem,
        dtype=config.dtype,
        is_single=config.is_single,
        force_upcast=force_upcast,
        channels_were_in_config=bool(file.constants.mean) and config.fold_scaling is None,
        metadata=metadata,
        half=half,
        comfyui_scaling=comfyui_scaling,
    )


# ---- Measuring on images ---------------------------------------------------------------------------------


def _measure(
    model: AutoencoderKL, path: str, config: ExportConfig, file: VaeFile, known: LatentConstants
) -> tuple[LatentConstants, bool]:
    """Measure the latents of the images at `path`, and whether activations overflow fp16; folds a scaling.

    The constants of the latents are the `known` ones and, for the rest, the measured ones. Those of a VAE
    with a folded scaling are new.
    """
    device = next(model.parameters()).device
    choose_kernels(config.kernels, device, [torch.float32])
    crops = Crops.of(path, config, file, model)
    images = track(crops.batches(), "latents", len(crops.images), "crop", keep=False)
    batches = (batch.to(device) for batch in images)
    statistics = _measure_latents(model, batches, crops.image_size, file.encoder_trained)
    if config.fold_scaling is not None:
        constants = _fold(model, statistics, config)
    else:
        constants = statistics.constants
        if known.scaling is not None:
            constants = constants._replace(scaling=known.scaling, shift=known.shift)
        elif model.bn is None and not known.mean and not file.encoder_trained:
            console.warning(
                f"--vae {config.vae[0]} does not contain the scaling of its latents, so it is measured on "
                f"--data_path: a diffusion model that exists knows its own ({published_flags()})"
            )
        if known.mean:
            constants = constants._replace(mean=known.mean, std=known.std)
    largest = largest_activation(model, (batch.to(device) for batch in crops.batches(FP16_IMAGES)))
    print_line = console.warning if largest.may_overflow_fp16 else console.info
    print_line(largest.summary())
    return constants, largest.may_overflow_fp16


@torch.no_grad()
def _measure_latents(
    model: AutoencoderKL, batches: Iterable[torch.Tensor], image_size: int, encoder_trained: bool
) -> LatentStatistics:
    """Measure the statistics of the latents; also sets a latent norm that is not measured for them."""
    latents, patches = sums_of(map(model.encode, batches), model.bn)
    statistics = latents.statistics()
    num_crops = statistics.count // (image_size // model.encoder_downsampling) ** 2
    console.info(
        f"latents of {num_crops} crops of {image_size} px: mean {statistics.shift:.5g}, "
        f"standard deviation {1 / statistics.scaling:.5g}"
    )
    if model.bn is not None and is_unmeasured(model.bn, encoder_trained):
        set_latent_norm(model, patches.statistics())
        console.info("  the latent norm is set to these statistics")
    return statistics


def _fold(model: AutoencoderKL, statistics: LatentStatistics, config: ExportConfig) -> LatentConstants:
    """Fold a scaling into the weights as --fold_scaling says; returns the constants of the new latents."""
    target = config.fold_scaling
    assert target is not None
    scaling, shift = FOLDED_SCALING[target]
    per_channel = config.per_channel or target == CHANNELS
    with_shift = model.quant_conv is not None
    multiply, add = folding_for(statistics, scaling, shift, per_channel=per_channel, with_shift=with_shift)
    device = next(model.parameters()).device
    fold(model, multiply.to(device), add.to(device))
    folded = statistics.folded(multiply, add)
    mean = round(((folded.mean - shift) * scaling).mean().item(), 3) + 0.0  # no -0
    hint = "" if with_shift else "; folding a shift needs --add_quant_conv"
    console.info(
        f"folded: with scaling {scaling} and shift {shift} ({target}) latents now have standard deviation 1 "
        f"and mean {mean:g}{hint}"
    )
    return folded.constants._replace(scaling=scaling, shift=shift)


# ---- Into a video VAE --------------------------------------------------------------------------------------


def _write_into(video: Path, output: Path, model: AutoencoderKL, dtype: str) -> None:
    """Write the video VAE at `video` with `model`, the 2-D network that is a part of it (parameter_names.py).

    A folder is written if `video` is one, else a single file. Raises UserError if it is another network.
    """
    where = f"--into {video}"
    file = read_vae(video, flag="--into")
    if file.kind != "wan" or model.config.family != "wan":
        other = "--vae" if model.config.family != "wan" else where
        raise UserError(f"--into is for Wan 2.1 and Qwen-Image, and {other} is another network: omit it")
    check_fit(build(file.shape).model, model.state_dict(), "--vae")
    located = locate_vae(video, "--into")
    tensors, metadata = read_tensors(located, where)
    kept = {name: value.to(DTYPES[dtype]) for name, value in tensors.items()}
    weights = stored_weights(model, dtype)
    stored = into_wan(kept, weights)
    if located.config is None:
        write_safetensors(output, stored, metadata)
    else:
        config = read_config(located.config, where) | norm_constants(model.bn).channels
        save_diffusers_folder(output, stored, config, metadata)
    latents = _latents_beside(file.weights, weights)
    console.info(f"written: {output} ({dtype}); its latents are {latents}")
    console.warning(
        "single images are exactly those of the trained network, but videos are not: keep the original for "
        "them"
    )


def _latents_beside(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> str:
    """The latents of the `new` weights of an encoder beside those of the `old` ones, in words."""
    names = [name for name in old if name.startswith(("encoder.", "quant_conv."))]
    pairs = [(old[name].flatten(), new[name].flatten()) for name in names]
    if all(torch.equal(before.to(torch.float64), after.to(torch.float64)) for before, after in pairs):
        return "unchanged"
    for dtype in DTYPES.values():  # of `new`, or of the file that it comes from
        if all(torch.equal(before.to(dtype).to(after.dtype), after) for before, after in pairs):
            return "those of before but for the rounding of the encoder's weights"
    return "new: models that were trained on the old ones do not fit"
