"""A command of evaluate_vae.py, top to bottom: check everything, measure one VAE after the other, write."""

import json
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vae.config.errors import UserError
from vae.config.evaluate_flags import WHOLE, EvaluateConfig
from vae.console import printable
from vae.data.decoding import parse_background
from vae.device import DTYPES, is_out_of_memory, pick_device
from vae.evaluation.codecs import CODECS, bits_per_pixel
from vae.evaluation.image_files import ImageSet, find_images
from vae.evaluation.learned_metrics import find_perceptual, find_rfid
from vae.evaluation.measuring import Instruments, Reconstruct, VaeCodec, classic_codec, measure
from vae.evaluation.probes import equivariance, grid_artefacts
from vae.evaluation.report.page import write_report
from vae.evaluation.results import Protocol, Results, VaeResult
from vae.evaluation.samples import Chosen, choose, write_originals, write_samples
from vae.evaluation.tables import terminal_text, write_csv, write_json, write_per_image_csv
from vae.interop.vae_files import LoadedVae, load_vae
from vae.pixels import to_float

OUTPUTS = ("report.html", "results.json", "results.csv", "per_image.csv", "samples")
CURVES_NAME = "metrics.jsonl"
MAX_CURVE_RECORDS = 2000  # of training steps; evenly thinned above, so that the page stays small
CROPS = {
    "resize": "short side scaled to the size (bicubic, averaging over areas), middle taken",
    "center": "middle taken, unscaled",
}
ROUNDING = "reconstructions clamped and rounded to 8 bit"


@dataclass
class Row:
    """One line of the comparison while it is measured."""

    result: VaeResult
    loaded: LoadedVae | None  # None: a classic codec
    codec: Reconstruct | None = None  # made when its turn comes


def compare(config: EvaluateConfig) -> Results:
    """Measure, print and write what the command asks for."""
    parse_background(config.background)  # raises UserError before any work
    output_dir = Path(config.output_dir)
    _check_output(output_dir, config.overwrite)
    device = pick_device(config.device)
    torch.backends.cudnn.allow_tf32 = False  # --dtype fp32 is to be fp32
    rows = [_load(config, path, name) for path, name in zip(config.vae, short_names(config.vae), strict=True)]
    if config.codecs:
        rows += _codec_rows(rows)
    missing: dict[str, str] = {}
    perceptual, net = find_perceptual(config, device, missing)
    tools = Instruments(device, perceptual, find_rfid(config, device, missing))
    image_set, unusable = find_images(config)
    sizes = tuple(sorted(config.sizes, key=lambda size: (size == WHOLE, size)))
    for row in rows:
        _measure_row(config, row, image_set, sizes, tools)
    chosen = choose([row.result.sizes[-1] for row in rows if row.loaded], config.samples)
    _write_images(config, rows, chosen, image_set, sizes[-1], device, output_dir)
    protocol = Protocol(
        data_path=config.data_path,
        images=len(image_set.names),
        sizes=sizes,
        crop="whole images" if sizes == (WHOLE,) else CROPS[config.crop],
        posterior=config.posterior,
        rounding=ROUNDING,
        dtype=config.dtype,
        device=_device_name(device),
        batch_size=config.batch_size,
        perceptual_net=net,
        seed=config.seed,
    )
    results = Results(protocol, _environment(device), [row.result for row in rows], missing, unusable)
    _explain_gaps(results, device)
    _write(results, output_dir)
    print(terminal_text(results))
    if net == "random":
        print("WARNING: --perceptual_net random: LPIPS has random weights; its values compare with no other")
    print(f"\nresults are in {printable(config.output_dir)}")
    return results


def _check_output(output_dir: Path, overwrite: bool) -> None:
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"--output_dir {output_dir} is a file: give a folder")
    there = [name for name in OUTPUTS if (output_dir / name).exists()]
    if there and not overwrite:
        raise UserError(
            f"--output_dir {output_dir} holds {there[0]} of an earlier comparison: add --overwrite, or give "
            "another folder"
        )


def short_names(paths: tuple[str, ...]) -> list[str]:
    """For each path as many of its last parts as tell it from the others, two of a folder named vae."""
    parts = [Path(path).absolute().parts for path in paths]
    names = []
    for own in parts:
        length = 2 if own[-1] == "vae" else 1
        while sum(other[-length:] == own[-length:] for other in parts) > 1 and length < len(own):
            length += 1
        names.append("/".join(own[-length:]))
    twice = next((path for path, name in zip(paths, names, strict=True) if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"--vae names {twice} twice: once is enough")
    return names


def _load(config: EvaluateConfig, path: str, name: str) -> Row:
    loaded = load_vae(Path(path), flag="--vae", weights=config.weights)
    said = {"weights_dtype": str(loaded.file.dtype).removeprefix("torch."), "step": loaded.file.step}
    result = VaeResult(
        name=name,
        path=path,
        kind=loaded.kind,
        curves=read_curves(Path(path).parent / CURVES_NAME),
        config={**loaded.file.shape, **{key: value for key, value in said.items() if value is not None}},
    )
    return Row(result, loaded)


def _codec_rows(rows: list[Row]) -> list[Row]:
    """JPEG and WebP, once for each number of bytes that a latent of the VAEs takes."""
    shapes: dict[float, tuple[int, int]] = {}
    for row in rows:
        model = row.loaded.autoencoder
        shape = (model.config.z_channels, model.downsampling)
        shapes.setdefault(bits_per_pixel(*shape), shape)
    found = []
    for bits, shape in shapes.items():
        for name in CODECS:
            title = f"{name} {bits:g} bit/px"
            config = {"bits_per_pixel": bits, "as_latents_of": f"{shape[0]} channels, {shape[1]}x smaller"}
            result = VaeResult(name=title, path="", kind="codec", config=config)
            found.append(Row(result, None, classic_codec(name, *shape)))
    return found


def _measure_row(
    config: EvaluateConfig, row: Row, image_set: ImageSet, sizes: tuple[int, ...], tools: Instruments
) -> None:
    result = row.result
    with _on_device(config, row, tools.device) as codec:
        for size in sizes:
            if isinstance(codec, VaeCodec):
                codec.start()
            title = f"{printable(result.name)}, {size or 'whole'}"
            one = measure(codec, image_set, size, config.batch_size, tools, title)
            result.sizes.append(one)
            if isinstance(codec, VaeCodec):
                codec.add_speed(one)
        if isinstance(codec, VaeCodec):
            result.latents = codec.latents.facts(codec.model)
            result.grid_artefacts = grid_artefacts(codec.model, codec.dtype)
            if config.probe_images:
                batches = (to_float(images).to(tools.device) for _, images in image_set.batches(sizes[0], 1))
                some = islice(batches, config.probe_images)
                result.equivariance = equivariance(codec.model, some, codec.dtype)


@contextmanager
def _on_device(config: EvaluateConfig, row: Row, device: torch.device) -> Iterator[Reconstruct]:
    """What reconstructs for a row, its weights on the device meanwhile."""
    if row.loaded is None:
        yield row.codec
        return
    model = row.loaded.autoencoder.to(device, memory_format=torch.channels_last)
    try:
        yield VaeCodec(model, DTYPES[config.dtype], config.seed if config.posterior == "sample" else None)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"--vae {row.result.path} does not fit into memory on {device.type} with --batch_size "
            f"{config.batch_size}, --sizes {' '.join(map(str, config.sizes))}: lower one of them"
        ) from None
    finally:
        model.to("cpu")


def _write_images(
    config: EvaluateConfig,
    rows: list[Row],
    chosen: list[Chosen],
    image_set: ImageSet,
    size: int,
    device: torch.device,
    output_dir: Path,
) -> None:
    folder = output_dir / "samples"
    for old in folder.glob("[0-9][0-9]_*.png"):  # of the comparison that is overwritten
        old.unlink()
    write_originals(chosen, image_set, size, folder)
    for position, row in enumerate(tqdm(rows, "samples", leave=False, disable=None)):
        with _on_device(config, row, device) as codec:
            result = row.result
            result.samples = write_samples(
                codec, position, chosen, image_set, result.sizes[-1], result.latents, folder
            )


def read_curves(path: Path) -> list[dict[str, Any]]:
    """Records of a run's metrics.jsonl, those of training steps evenly thinned; none if there is no file."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # torn by a crash
            continue
        if isinstance(record, dict):
            records.append(record)
    train = [record for record in records if record.get("kind") == "train"]
    every = -(-len(train) // MAX_CURVE_RECORDS) or 1
    kept = {id(record) for record in train[::every]}
    return [record for record in records if record.get("kind") != "train" or id(record) in kept]


def _explain_gaps(results: Results, device: torch.device) -> None:
    """Say of every value that is None why, where nothing has said it yet."""
    if device.type != "cuda":
        results.missing["peak memory"] = "not measured on a CPU"
    for vae in results.vaes:
        for one in vae.sizes:
            failed = sum(values["psnr"] is None for values in one.per_image.values())
            if failed:
                why = "needs more bytes at any quality" if vae.kind == "codec" else "gave NaN or infinity"
                where = f"{vae.name} at {one.size or 'whole'}"
                results.missing[where] = f"{why} for {failed} of {len(one.per_image)} images: no means"
                continue
            for metric in ("ssim", "ms_ssim", "lpips"):
                if one.metrics[metric] is None and metric not in results.missing:
                    results.missing[f"{metric} at {one.size or 'whole'}"] = "the images are too small for it"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _environment(device: torch.device) -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "torchvision", "Pillow", "numpy", "lpips")}
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(Path(word).name if i == 0 else word for i, word in enumerate(sys.argv)),
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": _device_name(device),
        "cuda": str(torch.version.cuda),
        **packages,
    }


def _write(results: Results, output_dir: Path) -> None:
    write_json(results, output_dir / "results.json")
    write_csv(results, output_dir / "results.csv")
    write_per_image_csv(results, output_dir / "per_image.csv")
    write_report(results, output_dir / "report.html")
