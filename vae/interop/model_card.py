"""The model card of an upload: README.md with the facts of the VAE and of the run that it comes from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vae.interop.families import class_of
from vae.interop.hub import hub_name
from vae.interop.run_files import METRICS_NAME
from vae.model.autoencoder import AutoencoderKL
from vae.system.files import read_json, read_json_lines

_FIGURES = {"psnr": ("PSNR", "{:.2f} dB"), "ssim": ("SSIM", "{:.4f}"), "lpips": ("LPIPS", "{:.4f}")}
PREFIX = "modelspec."
# Of the file that was trained or converted: what stays true of the result.
_INHERITED = ("architecture", "author", "license", "usage_hint", "category", "description")
COMPVIS = "https://github.com/CompVis/latent-diffusion"  # whose parameter names single files have


def card_files(
    name: str,
    license: str,
    model: AutoencoderKL,
    content: dict[str, Any],
    run: Path | None = None,
    step: int | None = None,
) -> dict[str, bytes | Path]:
    """README.md and its pictures for a VAE with `content` as its config.json.

    `run` is the folder of the run that trained it, as `run_of` finds it; `step` is the step of its
    checkpoint, None: the last one.
    """
    pictures = {} if run is None else _pictures(run)
    text = "\n".join(
        [
            *_header(license, content, run),
            f"# {name}\n",
            *_facts(model, content),
            *([] if run is None else _figures(run, step)),
            *(f"![{title}]({title}.png)\n" for title in pictures),
        ]
    )
    return {"README.md": text.encode(), **{f"{title}.png": path for title, path in pictures.items()}}


def run_of(vae: Path) -> Path | None:
    """The folder of the run that wrote `vae`: a checkpoint, its folder vae/, or the folder itself."""
    for folder in (vae, vae.parent):
        if (folder / METRICS_NAME).is_file() and (folder / "config.json").is_file():
            return folder
    return None


def _pictures(run: Path) -> dict[str, Path]:
    """The newest sample grid and the curves of a run, as far as there are any."""
    samples = sorted((run / "samples").glob("samples_step_*.png"))
    found = {"samples": samples[-1]} if samples else {}
    return found | ({"results": run / "results.png"} if (run / "results.png").is_file() else {})


def _header(license: str, content: dict[str, Any], run: Path | None) -> list[str]:
    lines = ["---", f"license: {license}", "tags: [vae, autoencoder, image-to-image]"]
    if not content["_class_name"].startswith("VaeTrainer"):
        lines.append("library_name: diffusers")
    settings = read_json(run / "config.json") if run is not None else {}
    if base := hub_name(Path(settings.get("init_from") or "")):
        lines.append(f"base_model: {base[0]}")
    return [*lines, "---\n"]


def _facts(model: AutoencoderKL, content: dict[str, Any]) -> list[str]:
    config = model.config
    facts = {
        "class": content["_class_name"],
        "latent channels": config.z_channels,
        "downsampling": f"{model.encoder_downsampling}x",
        "channels": " ".join(map(str, config.channels)),
        "channels of the decoder": " ".join(map(str, config.up_channels)),
        "parameters": f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million",
    }
    facts |= {name: content[name] for name in ("scaling_factor", "shift_factor") if name in content}
    return _table("VAE", facts)


def _figures(run: Path, step: int | None) -> list[str]:
    """Of the validation at this step, or of the last one, with what it is compared with."""
    last: dict[str, dict[str, Any]] = {}
    for record in read_json_lines(run / METRICS_NAME):
        if record.get("kind") == "baseline" or (
            record.get("kind") == "validation" and step in (None, record.get("step"))
        ):
            last[str(record.get("codec", "VAE")).replace("_", " ")] = record
    columns = [name for name in _FIGURES if any(name in record for record in last.values())]
    if "VAE" not in last or not columns:
        return []
    lines = ["| reconstruction | " + " | ".join(_FIGURES[name][0] for name in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for codec, record in last.items():
        cells = [_FIGURES[name][1].format(record[name]) if name in record else "" for name in columns]
        lines.append(f"| {codec} | " + " | ".join(cells) + " |")
    record = last["VAE"]
    size, images = record.get("image_size"), record.get("images")
    return [f"Mean of {images} validation images at {size} px:\n", *lines, ""]


def _table(title: str, values: dict[str, Any]) -> list[str]:
    return [f"| {title} | |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items()), ""]


# ---- ModelSpec -------------------------------------------------------------------------------------------


def modelspec(
    model: AutoencoderKL,
    output: Path,
    sample_size: int,
    source: Mapping[str, str] | None = None,
    *,
    implementation: str = "diffusers",
    license: str | None = None,
) -> dict[str, str]:
    """The keys of an export to `output`, trained at `sample_size` px; `source`: the metadata of its file."""
    values = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{class_of(model.config)}-z{model.config.z_channels}-f{model.encoder_downsampling}",
        "implementation": implementation,
        "title": output.stem,
        "resolution": f"{sample_size}x{sample_size}",
    }
    for name in _INHERITED:
        if PREFIX + name in (source or {}):
            values[name] = (source or {})[PREFIX + name]
    if license:
        values["license"] = license
    return {PREFIX + name: value for name, value in values.items()}
