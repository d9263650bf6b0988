"""Exported files have the same meaning to diffusers and the research code: every family and format."""

import json

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.harness.small_vae import write_vae
from tests.harness.vae_families import FAMILIES, SMALL, diffusers_model, image, research_model, save_research
from vae.config.model_options import ModelConfig
from vae.config.resolve import tiny_shape
from vae.config.trained_vae_flags import ExportConfig
from vae.interop.exporting import export
from vae.interop.families import comfyui_problem
from vae.interop.latent_statistics import LatentConstants
from vae.interop.vae_files import load_vae
from vae.interop.vae_path import WEIGHTS_NAME
from vae.interop.writing import COMPVIS
from vae.system.errors import UserError


def write(*vaes, output, **options) -> None:
    export(ExportConfig(vae=tuple(map(str, vaes)), output=str(output), **options))


def assert_bitwise(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert found.dtype == expected.dtype
    assert (found - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_diffusers_to_research_format_and_back(family, tmp_path):
    theirs = diffusers_model(family)
    theirs.save_pretrained(tmp_path / "theirs")
    write(tmp_path / "theirs", output=tmp_path / "one.safetensors")
    write(tmp_path / "one.safetensors", output=tmp_path / "back")
    assert_bitwise(load_file(tmp_path / "back" / WEIGHTS_NAME), load_file(tmp_path / "theirs" / WEIGHTS_NAME))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    known = dict(theirs.config) | {"_class_name": type(theirs).__name__}
    for name, value in config.items():
        if name not in ("_diffusers_version", "shift_factor"):
            expected = known[name]
            assert value == (list(expected) if isinstance(expected, tuple) else expected), name
    assert (config.get("shift_factor") or 0) == (known.get("shift_factor") or 0)

    research = research_model(family)
    research.load_state_dict(load_file(tmp_path / "one.safetensors"))  # strict
    expected = theirs(image()).sample
    assert_near(research.decode(research.encode(image())), expected)
    if family != "flux2":  # diffusers does not read it as a single file
        single = {"config": str(tmp_path / "back"), "local_files_only": True}
        model = AutoencoderKL.from_single_file(str(tmp_path / "one.safetensors"), **single)
        assert_near(model(image()).sample, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_research_format_to_diffusers_and_back_gives_the_same_images(family, tmp_path):
    theirs = research_model(family)
    path = save_research(tmp_path / "theirs.safetensors", theirs)
    write(path, output=tmp_path / "folder", scaling_factor=0.5)
    write(tmp_path / "folder", output=tmp_path / "back.safetensors")
    assert_bitwise(load_file(tmp_path / "back.safetensors"), theirs.state_dict())
    kind = AutoencoderKLFlux2 if family == "flux2" else AutoencoderKL
    model, ours = kind.from_pretrained(tmp_path / "folder"), load_vae(path).autoencoder
    latents = theirs.encode(image())
    assert_near(model.encode(image()).latent_dist.mode(), latents)
    assert_near(ours.encode(image()).mode(), latents)
    assert_near(model.decode(latents).sample, theirs.decode(latents))
    assert_near(ours.decode(latents), theirs.decode(latents))


def test_flux2_latent_norm_matches_its_batch_norm(tmp_path):
    theirs = diffusers_model("flux2")
    theirs.save_pretrained(tmp_path)
    ours = load_vae(tmp_path).autoencoder
    latents = theirs.encode(image()).latent_dist.mode()
    batch, z, height, width = latents.shape
    patches = latents.view(batch, z, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
    normalised = theirs.bn(patches.reshape(batch, 4 * z, height // 2, width // 2))  # in evaluation mode
    assert_near(ours.bn.normalize(latents), normalised)


@pytest.mark.parametrize(("dtype", "kind"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_precision_export_is_a_cast(dtype, kind, tmp_path):
    theirs = research_model("flux2", *SMALL)
    path = save_research(tmp_path / "theirs.safetensors", theirs)
    state = theirs.state_dict()
    weights = {name for name, _ in theirs.named_parameters()}  # the constants of latents stay as they are
    expected = {name: value.to(kind) if name in weights else value for name, value in state.items()}
    for source, output in ((path, "half.safetensors"), (tmp_path / "half.safetensors", "again.safetensors")):
        write(source, output=tmp_path / output, dtype=dtype)
        assert_bitwise(load_file(tmp_path / output), expected)
        assert load_vae(tmp_path / output).file.dtype == kind


def test_readme_of_a_folder_has_the_figures_of_its_run(tmp_path):
    write_vae(tmp_path / "run" / "vae")
    records = [
        {"kind": "validation", "step": 5, "image_size": 64, "psnr": 20.0, "ssim": 0.5, "images": 2},
        {"kind": "validation", "step": 9, "image_size": 64, "psnr": 31.25, "ssim": 0.9, "images": 2},
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    write(tmp_path / "run" / "vae", output=tmp_path / "out", license="cc0-1.0")
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    for part in (
        "license: cc0-1.0\n",
        "16 latent channels, scaling_factor 0.5",
        "PSNR 31.25 dB, SSIM 0.9000:",
    ):
        assert part in text
    assert text.count("AutoencoderKL.from_pretrained") == 1
    write(tmp_path / "out", output=tmp_path / "again")
    assert "PSNR" not in (tmp_path / "again" / "README.md").read_text(encoding="utf-8")


def test_weight_too_large_for_fp16_is_an_error(tmp_path):
    theirs = research_model("sd", *SMALL)
    theirs.decoder.conv_out.weight[0, 0, 0, 0] = 7e4
    path = save_research(tmp_path / "theirs.safetensors", theirs)
    with pytest.raises(UserError, match=r"--dtype fp16 .*decoder\.conv_out\.weight.*use bf16 or fp32"):
        write(path, output=tmp_path / "half.safetensors", dtype="fp16")
    assert not (tmp_path / "half.safetensors").exists()


@pytest.mark.parametrize("family", ["sd", "flux"])
def test_constants_of_channels_are_in_config_where_no_program_misreads_them(family, tmp_path, image_folder):
    """With 4 channels, SDXL's pipelines would apply them beside the scaling."""
    diffusers_model(family, *SMALL).save_pretrained(tmp_path / "theirs")
    write(tmp_path / "theirs", output=tmp_path / "ours", data_path=str(image_folder / "inner"), image_size=32)
    with safe_open(tmp_path / "ours" / WEIGHTS_NAME, "pt") as file:
        mean, std = (json.loads(file.metadata()[name]) for name in ("latents_mean", "latents_std"))
    model = AutoencoderKL.from_pretrained(tmp_path / "ours")
    assert len(mean) == len(std) == model.config.latent_channels
    in_config = model.config.latents_mean, model.config.latents_std
    assert in_config == ((mean, std) if family == "flux" else (None, None))


def test_constants_of_channels_in_the_input_are_kept(tmp_path):
    """As those of Playground 2.5, with 4 channels."""
    theirs = diffusers_model("sdxl", *SMALL)
    theirs.register_to_config(latents_mean=[-1.0, 2.0, 3.0, 4.0], latents_std=[1.0, 2.0, 3.0, 5.0])
    theirs.save_pretrained(tmp_path / "theirs")
    write(tmp_path / "theirs", output=tmp_path / "one.safetensors")
    write(tmp_path / "one.safetensors", output=tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["latents_mean"], config["latents_std"]) == ([-1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 5.0])
    assert load_vae(tmp_path / "one.safetensors").scaling_factor == 0.13025
    config["latents_std"] = [1.0, 2.0]
    (tmp_path / "back" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"latents_std in config\.json is not a list of 4 numbers"):
        load_vae(tmp_path / "back")


def test_diffusers_export_needs_a_scaling(tmp_path):
    path = save_research(tmp_path / "theirs.safetensors", research_model("sd", *SMALL))
    with pytest.raises(UserError, match=r"SDXL: --scaling_factor 0\.13025; .* or --data_path to measure it"):
        write(path, output=tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def metadata_of(path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def test_exports_have_modelspec_keys_and_keep_license_and_author(tmp_path):
    theirs = {
        "modelspec.license": "Apache-2.0",
        "modelspec.title": "Their VAE",
        "modelspec.hash_sha256": "0x1",
    }
    source = tmp_path / "theirs.safetensors"
    tensors = {name: value.contiguous() for name, value in research_model("flux").state_dict().items()}
    save_file(tensors, source, metadata=theirs)
    write(source, output=tmp_path / "mine", scaling_factor=0.5)
    write(source, output=tmp_path / "mine.safetensors")
    for name, implementation in ((f"mine/{WEIGHTS_NAME}", "diffusers"), ("mine.safetensors", COMPVIS)):
        found = {key: value for key, value in metadata_of(tmp_path / name).items() if "modelspec" in key}
        assert found == {
            "modelspec.sai_model_spec": "1.0.1",
            "modelspec.architecture": "AutoencoderKL-z16-f8",
            "modelspec.implementation": implementation,
            "modelspec.title": "mine",
            "modelspec.resolution": "256x256",
            "modelspec.license": "Apache-2.0",
        }


@pytest.mark.parametrize(
    ("shape", "scaling", "part"),
    [
        ({}, (1.5305, 0.0609), None),
        ({"z_channels": 4, "use_quant_conv": True}, (0.9, 0.0), None),
        ({"z_channels": 32, "latent_norm": True}, (), None),
        ({"z_channels": 64}, (1.0, 0.0), "64 latent channels for one of Hunyuan"),
        ({"z_channels": 32}, (1.0, 0.0), "32 latent channels for one of Hunyuan"),
        ({}, (0.9, 0.1), "not by scaling 0.9, shift 0.1: --fold_scaling"),
        ({"channels": (64, 128, 256, 256)}, (), "expects channels 128 256 512 512, two blocks"),
        ({"family": "wan"}, (), "add --into"),
        (tiny_shape(16, 4), (1.0, 0.0), None),
        (tiny_shape(32, 4, "taef2"), (1.0, 0.0), None),
        (tiny_shape(32, 4), (1.0, 0.0), "no --family tiny with 32 latent channels and 4 levels"),
        (tiny_shape(4, 3), (1.0, 0.0), "no --family tiny with 4 latent channels and 3 levels"),
        (tiny_shape(32, 6, "taesana"), (1.0, 0.0), "no --family taesana with 32 latent channels"),
    ],
)
def test_comfyui_would_take_a_single_file_for_another_network(shape, scaling, part):
    problem = comfyui_problem(ModelConfig(**shape), LatentConstants(*scaling))
    assert problem is None if part is None else part in problem
