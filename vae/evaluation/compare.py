"""A command of evaluate_vae.py, from top to bottom: check everything, measure each VAE, write the results."""

import platform
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from vae.config.trained_vae_flags import WHOLE, EvaluateConfig, ExportConfig
from vae.data.exclude_list import hash_of_list
from vae.device import DTYPES, is_out_of_memory, pick_device, precision_support, warn_of_slow_bf16
from vae.evaluation.diagnose import diagnose
from vae.evaluation.early_checks import COMMAND, RESULTS_NAME
from vae.evaluation.image_set import CROPS, ImageSet, find_images
from vae.evaluation.latents import diffusability
from vae.evaluation.measure import (
    CODECS,
    Metrics,
    Reconstruct,
    VaeCodec,
    bicubic_reconstruction,
    bits_per_pixel,
    classic_codec,
    measure,
)
from vae.evaluation.metrics import find_perceptual, find_rfid
from vae.evaluation.page import write_report
from vae.evaluation.results import METRICS, PER_IMAGE, Protocol, Results, VaeResult, as_json
from vae.evaluation.samples import choose, write_originals, write_samples
from vae.evaluation.tables import terminal_text, write_per_image_csv, write_results_csv
from vae.interop.exporting import export
from vae.interop.vae_files import LoadedVae, load_vae
from vae.losses.perceptual import RANDOM_NOTE
from vae.model.activation_scale import UNKNOWN, scale_activations
from vae.ops.kernel_check import choose_kernels
from vae.progress import track
from vae.shards.dataset_json import is_dataset
from vae.system import console
from vae.system.addresses import public_text
from vae.system.console import counted
from vae.system.errors import UserError
from vae.system.files import claim_folder, read_json, replace_bytes, write_json

REPORT_NAME = "report.html"


@dataclass
class Row:
    """A row of the comparison: one VAE, baseline or classic codec, and its result so far."""

    result: VaeResult
    source: LoadedVae | Reconstruct


def compare(config: EvaluateConfig) -> Results:
    """Measure the VAEs, and print and write the results."""
    output_dir = Path(config.output_dir)
    metrics, net, missing = open_metrics(config)
    device = metrics.device
    rows = _load_rows(config, device)
    image_set, unusable = find_images(config, image_channels(rows))
    sizes = tuple(sorted(config.sizes, key=lambda size: (size == WHOLE, size)))
    for row in rows:
        _measure_row(config, row, image_set, sizes, metrics)
    claim_folder(output_dir, COMMAND)
    _remove_earlier(output_dir)
    _write_sample_files(config, rows, image_set, device, output_dir / "samples")
    results = Results(
        _protocol(config, len(image_set.names), sizes, device, net),
        _environment(device),
        [row.result for row in rows],
        missing,
        unusable,
    )
    _explain_missing(config, results, device)
    write_results_csv(results, output_dir / "results.csv")
    write_per_image_csv(results, output_dir / "per_image.csv")
    write_report(results, output_dir / REPORT_NAME)
    write_json(output_dir / RESULTS_NAME, as_json(results, output_dir), indent=1)
    console.info(terminal_text(results))
    if net == "random":
        console.warning(RANDOM_NOTE)
    console.info(f"\nresults are in {console.printable(config.output_dir)}")
    if config.promote is not None:
        _promote(config, results)
    return results


def _promote(config: EvaluateConfig, results: Results) -> None:
    """Write the best VAE into the folder of --promote, with the report; UserError if no VAE has a mean."""
    assert config.promote is not None
    measured = {vae.path: vae.sizes[-1].metrics for vae in results.networks}
    judges_lpips = results.protocol.perceptual_net != "random"
    metric = "lpips" if judges_lpips and any(m["lpips"] is not None for m in measured.values()) else "psnr"
    values = {path: value for path, m in measured.items() if (value := m[metric]) is not None}
    if not values:
        raise UserError(f"--promote {config.promote}: no VAE has reconstructed all images")
    best = (min if METRICS[metric].better == "lower" else max)(values, key=lambda path: values[path])
    images = None if is_dataset(config.data_path) else config.data_path  # for latents that were not measured
    chosen = ExportConfig((best,), config.promote, weights=config.weights, device=config.device)
    export(replace(chosen, data_path=images, overwrite=True))
    report = Path(config.output_dir) / REPORT_NAME
    replace_bytes(Path(config.promote) / REPORT_NAME, report.read_bytes())
    shown = f"{METRICS[metric].title} {values[best]:.{METRICS[metric].decimals}f}"
    console.info(f"promoted: {console.printable(best)}, {shown}")


def _remove_earlier(folder: Path) -> None:
    """Remove the results that --overwrite replaces, with the samples that they name."""
    try:
        samples = [sample for vae in read_json(folder / RESULTS_NAME)["vaes"] for sample in vae["samples"]]
        names = {name for s in samples for name in (s["original"], s["recon"], s["error"], *s["latents"])}
    except (OSError, ValueError, KeyError, TypeError):
        names = set()
    for name in names:
        if re.fullmatch(r"samples/\w+\.png", str(name)):
            (folder / name).unlink(missing_ok=True)
    (folder / RESULTS_NAME).unlink(missing_ok=True)


def open_metrics(config: EvaluateConfig) -> tuple[Metrics, str | None, dict[str, str]]:
    """The metrics on their device, the network of LPIPS, and why others are missing."""
    device = pick_device(config.device)
    warn_of_slow_bf16(config.dtype, precision_support(device))
    torch.backends.cudnn.allow_tf32 = False  # --dtype fp32 means fp32, not TF32
    choose_kernels(config.kernels, device, [DTYPES[config.dtype]])
    missing: dict[str, str] = {}
    perceptual, net = find_perceptual(config, device, missing)
    return Metrics(device, perceptual, find_rfid(config, device, missing)), net, missing


def short_names(paths: Sequence[str], flag: str = "--vae") -> list[str]:
    """For each path, the fewest last parts that make it unique; at least two if the last one is `vae`."""
    parts = [Path(path).absolute().parts for path in paths]
    names = []
    for own in parts:
        length = 2 if own[-1] == "vae" else 1
        while sum(other[-length:] == own[-length:] for other in parts) > 1 and length < len(own):
            length += 1
        names.append("/".join(own[-length:]))
    twice = next((path for path, name in zip(paths, names, strict=True) if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{flag} contains {twice} twice: give it once")
    return names


def _load_rows(config: EvaluateConfig, device: torch.device) -> list[Row]:
    """The VAEs, then what they are compared with."""
    rows, latent_shapes = [], []
    for path, name in zip(config.vae, short_names(config.vae), strict=True):
        loaded = load_vae(Path(path), flag="--vae", weights=config.weights)
        facts = {"weights_dtype": str(loaded.file.dtype).removeprefix("torch."), "step": loaded.file.step}
        result = VaeResult(
            name=name,
            path=path,
            kind=loaded.kind,
            config={**loaded.file.shape, **{key: value for key, value in facts.items() if value is not None}},
        )
        rows.append(Row(result, loaded))
        latent_shapes.append((loaded.autoencoder.config.z_channels, loaded.autoencoder.downsampling))
    if not config.codecs:
        return rows
    return rows + _reference_rows(latent_shapes, has_alpha=image_channels(rows) == 4)


def image_channels(rows: Sequence[Row]) -> int:
    """The channels of the images of all VAEs; UserError if they differ."""
    of_vae = {
        row.result.path: row.source.autoencoder.config.image_channels
        for row in rows
        if isinstance(row.source, LoadedVae)
    }
    (first, channels), *others = of_vae.items()
    for path, other in others:
        if other != channels:
            raise UserError(
                f"--vae {path} has {other} image channels, and {first} {channels}: compare VAEs with as many"
            )
    return channels


def _reference_rows(latent_shapes: list[tuple[int, int]], has_alpha: bool) -> list[Row]:
    """Bicubic for each downsampling, JPEG and WebP for each latent size. Shapes: (channels, downsampling).

    JPEG has no alpha.
    """
    rows = []
    for factor in sorted({factor for _, factor in latent_shapes}):
        facts: dict[str, Any] = {"reduction": f"{factor}x by area average, enlarged bicubically"}
        result = VaeResult(name=f"bicubic {factor}x", path="", kind="baseline", config=facts)
        rows.append(Row(result, bicubic_reconstruction(factor)))
    shapes = {bits_per_pixel(*shape): shape for shape in reversed(latent_shapes)}  # the first of each size
    for bits in dict.fromkeys(bits_per_pixel(*shape) for shape in latent_shapes):
        channels, factor = shapes[bits]
        facts = {"bits_per_pixel": bits, "latents": f"{channels} channels, {factor}x downsampling"}
        for name in ("WebP",) if has_alpha else CODECS:
            result = VaeResult(name=f"{name} {bits:g} bit/px", path="", kind="codec", config=facts)
            rows.append(Row(result, classic_codec(name, channels, factor)))
    return rows


def _measure_row(
    config: EvaluateConfig, row: Row, image_set: ImageSet, sizes: tuple[int, ...], metrics: Metrics
) -> None:
    result = row.result
    with on_device(config, row, metrics.device) as codec:
        for size in sizes:
            if isinstance(codec, VaeCodec):
                codec.start()
            title = f"{console.printable(result.name)}, {size or 'whole'}"
            size_result = measure(codec, image_set, size, config.batch_size, metrics, title)
            result.sizes.append(size_result)
            if isinstance(codec, VaeCodec):
                codec.add_speed(size_result)
        if isinstance(codec, VaeCodec):
            result.latents = codec.latents.facts(codec.model)
            if config.diagnose:
                pairs = image_set.batches(sizes[-1], 1)
                title = f"{console.printable(result.name)}, defects"
                tracked = track(pairs, title, len(image_set.names), "image", keep=False)
                result.diagnosis = diagnose(codec, (images for _, images in tracked))
            if config.diffusability:
                square = next(size for size in sizes if size != WHOLE)
                batches = (images for _, images in image_set.batches(square, 1))
                result.diffusability = diffusability(codec.model, batches, codec.dtype)


@contextmanager
def on_device(config: EvaluateConfig, row: Row, device: torch.device) -> Iterator[Reconstruct]:
    """The row's reconstruction function; the VAE's weights are on the device until the end."""
    if not isinstance(row.source, LoadedVae):
        yield row.source
        return
    model = row.source.autoencoder.to(device).to(memory_format=torch.channels_last)
    scale_activations(model, UNKNOWN if config.dtype == "fp16" else 1.0)
    try:
        yield VaeCodec(model, DTYPES[config.dtype], config.seed if config.posterior == "sample" else None)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"--vae {row.result.path} does not fit into memory on {device.type} with --batch_size "
            f"{config.batch_size} and --sizes {' '.join(map(str, config.sizes))}: lower one of them"
        ) from None
    finally:
        model.to("cpu")


def _write_sample_files(
    config: EvaluateConfig, rows: list[Row], image_set: ImageSet, device: torch.device, folder: Path
) -> None:
    """Choose the sample images, and write their reconstructions by every row."""
    networks = [row.result.sizes[-1] for row in rows if isinstance(row.source, LoadedVae)]
    chosen = choose(networks, config.samples)
    write_originals(chosen, image_set, networks[0].size, folder)
    for position, row in enumerate(track(rows, "samples", len(rows), "row", keep=False)):
        with on_device(config, row, device) as codec:
            result = row.result
            result.samples = write_samples(
                codec, position, chosen, image_set, result.sizes[-1], result.latents, folder
            )


def _explain_missing(config: EvaluateConfig, results: Results, device: torch.device) -> None:
    """Add a reason for every value that is None and has no reason yet."""
    if device.type != "cuda":
        results.missing["peak memory"] = "not measured on a CPU"
    for vae in results.vaes:
        if config.diffusability and vae.is_network and None in (vae.diffusability or {"": None}).values():
            results.missing[f"latents for diffusion of {vae.name}"] = "NaN or infinity"
        if None in vae.diagnosis.values():
            results.missing[f"defects of {vae.name}"] = (
                "a grid and speckles need smooth regions, a border images above 32 px, all finite results"
            )
        for result in vae.sizes:
            failed = sum(values["psnr"] is None for values in result.per_image.values())
            if failed:
                reason = "needs more bytes at any quality" if vae.kind == "codec" else "NaN or infinity"
                results.missing[f"{vae.name} at {result.size or 'whole'}"] = (
                    f"{reason} for {failed} of {len(result.per_image)} images: no means"
                )
                continue
            for metric in set(PER_IMAGE) - {"psnr_alpha"}:
                if result.metrics[metric] is None and metric not in results.missing:
                    results.missing[f"{metric} at {result.size or 'whole'}"] = (
                        "the images are too small for it"
                    )


def _protocol(
    config: EvaluateConfig, images: int, sizes: tuple[int, ...], device: torch.device, net: str | None
) -> Protocol:
    return Protocol(
        data_path=public_text(config.data_path),
        images=images,
        sizes=sizes,
        crop="whole images" if sizes == (WHOLE,) else CROPS[config.crop],
        posterior=config.posterior,
        dtype=config.dtype,
        device=_device_name(device),
        batch_size=config.batch_size,
        perceptual_net=net,
        seed=config.seed,
        exclude=hash_of_list(config.exclude),
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {counted(torch.get_num_threads(), 'thread')}"


def _environment(device: torch.device) -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "torchvision", "Pillow", "numpy", "lpips")}
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join([Path(sys.argv[0]).name, *map(public_text, sys.argv[1:])]),
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": _device_name(device),
        "cuda": str(torch.version.cuda),
        **packages,
    }
