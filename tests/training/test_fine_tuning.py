"""Training starts from published VAEs, and --train_part decoder does not change their latents."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL as AutoencoderKLOfDiffusers
from safetensors.torch import load_file, save_file

from tests.harness.images import centre_crops
from tests.harness.runs import TINY
from tests.harness.small_vae import SMALL as SMALL_VAE
from tests.harness.small_vae import write_vae
from tests.harness.toy_networks import NO_LPIPS, toy_terms
from tests.harness.training_runs import last_checkpoint, records
from tests.harness.vae_families import FAMILIES, SMALL, diffusers_model, image, research_model, save_research
from vae.config.model_options import ModelConfig
from vae.config.options import RECOMPUTE
from vae.interop.vae_files import load_vae
from vae.interop.vae_path import WEIGHTS_NAME
from vae.model.autoencoder import AutoencoderKL, set_recompute
from vae.step import Networks, StepInputs, compute_gradients
from vae.system.errors import UserError
from vae.training.run import train

SHAPE = ("channels", "layers_per_block", "norm_groups", "z_channels")


@pytest.fixture
def options(image_folder, other_images, tmp_path) -> dict:
    """A run of one epoch without flags for the model's shape, validated on all images of a folder."""
    given = {name: value for name, value in TINY.items() if name not in (*SHAPE, "val_split")}
    paths = {
        "data_path": str(other_images),
        "val_path": str(image_folder),
        "output_dir": str(tmp_path / "run"),
    }
    return {**given, **paths, "num_epochs": 1, "learning_rate": 1e-3}


def psnr_of(reconstruct: Callable[[torch.Tensor], torch.Tensor], image_folder: Path) -> float:
    """Mean PSNR, dB, of 8-bit reconstructions."""
    values = []
    for crop in centre_crops(image_folder):
        recon = reconstruct(crop.float() / 127.5 - 1)
        stored = ((recon.clamp(-1, 1) + 1) * 127.5).round().numpy().astype(np.float64)
        values.append(10 * np.log10(255**2 / np.mean((stored - crop.numpy()) ** 2)))
    return float(np.mean(values))


def exported_config(folder: Path) -> dict:
    """The config.json of a run's export."""
    return json.loads((folder / "vae" / "config.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "flux2"])
def test_decoder_training_starts_from_the_published_vae_and_keeps_its_encoder(
    family, options, image_folder, tmp_path
):
    published = research_model(family, *SMALL)
    source = save_research(tmp_path / "model.safetensors", published, "first_stage_model.")
    _, _, scaling, shift = FAMILIES[family]
    given = {"init_from": str(source), "train_part": "decoder"}
    if family == "sdxl":  # its file contains no scaling
        given |= {"scaling_factor": scaling}
    assert train({**options, **given}) == 0
    folder = Path(options["output_dir"])
    first, last = records(folder, "validation")
    assert (first["step"], last["step"]) == (0, 4)
    assert first["psnr"] == pytest.approx(
        psnr_of(lambda x: published.decode(published.encode(x)), image_folder), abs=1e-3
    )
    before = load_vae(source)
    for weights in ("raw", "ema"):
        after = load_vae(folder / "checkpoint_epoch_1.pt", weights=weights)
        old, new = before.autoencoder.state_dict(), after.autoencoder.state_dict()
        changed = {name for name in old if not torch.equal(old[name], new[name])}
        assert {name.split(".")[0] for name in changed} == {"decoder"} | (
            {"post_quant_conv"} if before.autoencoder.config.use_quant_conv else set()
        )
        posteriors = [vae.autoencoder.encode(image()) for vae in (before, after)]
        assert torch.equal(posteriors[0].mean, posteriors[1].mean)
        assert torch.equal(posteriors[0].logvar, posteriors[1].logvar)
        assert after.scaling_factor == (None if family == "flux2" else scaling)
    config = exported_config(folder)
    if family == "flux2":
        assert config["_class_name"] == "AutoencoderKLFlux2"
    else:
        assert (config["scaling_factor"], config["shift_factor"]) == (scaling, shift or 0.0)


def test_unknown_constants_of_latents_that_do_not_change_are_an_error(options, tmp_path):
    """They are never measured: diffusion models were trained with others."""
    source = save_research(tmp_path / "model.safetensors", research_model("sdxl", *SMALL), "")
    unknown = r"does not contain the scaling of its latents.*SDXL: --scaling_factor 0\.13025"
    with pytest.raises(UserError, match=f"--init_from .*{unknown}"):
        train({**options, "init_from": str(source), "train_part": "decoder"})
    with pytest.raises(UserError, match=r"^--scaling_factor 0.5: --latent_norm has no place for it"):
        train({**options, "latent_norm": True, "scaling_factor": 0.5})
    assert not Path(options["output_dir"]).exists()


@pytest.mark.slow
def test_resumed_decoder_training_keeps_the_constants_of_the_latents(options, tmp_path):
    published = diffusers_model("flux", *SMALL)
    published.register_to_config(latents_mean=[0.5] * 16, latents_std=[2.0] * 16)
    published.save_pretrained(tmp_path / "published")
    given = {**options, "init_from": str(tmp_path / "published"), "train_part": "decoder"}
    assert train({**given, "max_steps": 1}) == 0
    resumed = {"output_dir": options["output_dir"], "resume_from": "latest", "max_steps": 2}
    with pytest.raises(UserError, match="--train_part all contradicts the checkpoint"):
        train({**resumed, "train_part": "all"})
    assert train(resumed) == 0
    config = exported_config(Path(options["output_dir"]))
    assert (config["scaling_factor"], config["shift_factor"]) == (0.3611, 0.1159)
    assert (config["latents_mean"], config["latents_std"]) == ([0.5] * 16, [2.0] * 16)


@pytest.mark.slow
def test_training_all_parts_changes_every_weight_and_another_run_starts_from_it(options, tmp_path):
    diffusers_model("sd", *SMALL).save_pretrained(tmp_path / "published")
    assert train({**options, "init_from": str(tmp_path / "published")}) == 0
    first = Path(options["output_dir"])
    old, new = (load_vae(path) for path in (tmp_path / "published", first / "checkpoint_epoch_1.pt"))
    weights = new.autoencoder.state_dict()
    assert all(not torch.equal(value, weights[name]) for name, value in old.autoencoder.state_dict().items())
    assert exported_config(first)["scaling_factor"] != 0.18215  # it is measured
    second = {**options, "output_dir": str(tmp_path / "second"), "train_part": "decoder"}
    with pytest.raises(UserError, match="give the folder vae/ of that run"):
        train({**second, "init_from": str(first / "checkpoint_epoch_1.pt")})
    assert train({**second, "init_from": str(first / "vae")}) == 0
    before, after = (records(folder, "validation") for folder in (first, tmp_path / "second"))
    assert after[0]["psnr"] == before[-1]["psnr"]


@pytest.mark.slow
def test_reflect_padding_is_given_once_and_kept(options, tmp_path):
    published = write_vae(tmp_path / "published")
    assert train({**options, "init_from": str(published), "padding": "reflect"}) == 0
    first = Path(options["output_dir"])
    assert exported_config(first)["padding_mode"] == "reflect"
    more = {**options, "output_dir": str(tmp_path / "more"), "new_stage": True}
    assert train({**more, "resume_from": str(first / "checkpoint_epoch_1.pt")}) == 0
    assert last_checkpoint(tmp_path / "more")["config"]["padding"] == "reflect"
    with pytest.raises(
        UserError, match="--padding zeros contradicts the file of --init_from, which has reflect"
    ):
        train(
            {
                **options,
                "output_dir": str(tmp_path / "no"),
                "init_from": str(first / "vae"),
                "padding": "zeros",
            }
        )


@pytest.mark.parametrize("level", RECOMPUTE)
def test_decoder_gradients_do_not_depend_on_the_frozen_encoder(level):
    torch.manual_seed(0)
    model = AutoencoderKL(ModelConfig(channels=(8, 16), layers_per_block=1, z_channels=4, norm_groups=4))
    set_recompute(model, level)
    inputs = StepInputs(
        images=torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8),
        noise=torch.randn(2, 4, 8, 8),
        image_share=0.5,
        loss_scale=torch.ones(()),
        adversarial_factor=None,
        running_moments=torch.tensor([0.5, 0.1, 0.8])[:, None].expand(3, 4),
    )
    gradients = []
    for _ in range(2):  # all parts, then the decoder alone
        networks = Networks(model, None, toy_terms(NO_LPIPS, torch.float32), torch.float32, False)
        compute_gradients(networks, inputs, [1, 1])
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad(set_to_none=True)
        model.freeze_encoder()
    all_parts, decoder = gradients
    assert set(decoder) == {name for name in all_parts if name.startswith(("decoder.", "post_quant_conv."))}
    for name, value in decoder.items():
        assert torch.equal(value, all_parts[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("has_decoder", [True, False])
def test_a_new_decoder_begins_as_a_codec_of_the_trained_latents(options, image_folder, tmp_path, has_decoder):
    shape = replace(SMALL_VAE, channels=(16, 32), z_channels=8, use_quant_conv=True)
    teacher = load_vae(write_vae(tmp_path / "teacher", shape=shape)).autoencoder
    if not has_decoder:
        path = tmp_path / "teacher" / WEIGHTS_NAME
        parts = ("encoder.", "quant_conv.")
        save_file({name: value for name, value in load_file(path).items() if name.startswith(parts)}, path)
    given = {"init_from": str(tmp_path / "teacher"), "train_part": "decoder", "decoder_channels": (8, 16)}
    assert train({**options, **given, "learning_rate": 1e-9}) == 0
    loaded = load_vae(tmp_path / "run" / "vae")
    student, pixels = loaded.autoencoder, image()
    assert student.config.decoder_channels == (8, 16)
    assert loaded.scaling_factor == 0.5
    with torch.no_grad():
        assert torch.equal(student.encode(pixels).mean, teacher.encode(pixels).mean)
    resumed = {**options, "output_dir": str(tmp_path / "more"), "new_stage": True}
    assert train({**resumed, "resume_from": str(tmp_path / "run" / "checkpoint_epoch_1.pt")}) == 0
    assert tuple(last_checkpoint(tmp_path / "more")["config"]["decoder_channels"]) == (8, 16)
    found = psnr_of(lambda images: student(images)[0], image_folder)
    assert found > psnr_of(lambda images: teacher(images)[0], image_folder) - 3


# ---- fp16 ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("computes_fp16")
@pytest.mark.parametrize(("layer", "scale"), [("resnets.1.conv1", 1 / 8), ("attentions.0.to_k", None)])
def test_vae_that_overflows_fp16_is_trained_with_scaled_activations_or_without_fp16(
    layer, scale, options, tmp_path, capsys
):
    """fp16 ends at 65,504, as in SDXL's VAE. Keys have no norm behind them, which would remove a scale."""
    theirs, folder = diffusers_model("sd", *SMALL), tmp_path / "run"
    theirs.decoder.mid_block.get_submodule(layer).bias[3] += 6e4
    theirs.save_pretrained(tmp_path / "theirs")
    given = {**options, "init_from": str(tmp_path / "theirs"), "num_epochs": 2}
    assert train({**given, "mixed_precision": True, "max_steps": 2}) == 0
    assert f"decoder.mid_block.{layer}" in capsys.readouterr().out
    assert train({"output_dir": str(folder), "resume_from": "latest", "max_steps": 4}) == 0
    assert "the largest activation" not in capsys.readouterr().out  # the checkpoint has the decision
    saved = last_checkpoint(folder)
    assert (saved["fp16"], saved["overflows_fp16"]) == (scale is not None, scale is None)
    assert exported_config(folder)["force_upcast"] is True  # for programs without a scale
    if scale is None:
        assert all(math.isfinite(record["psnr"]) for record in records(folder, "validation"))
        return
    assert saved["activation_scale"] == scale
    assert train({**given, "output_dir": str(tmp_path / "fp32"), "max_steps": 4}) == 0
    last = [records(run, "validation")[-1]["psnr"] for run in (folder, tmp_path / "fp32")]
    assert last[0] == pytest.approx(last[1], abs=0.02)


@pytest.mark.slow
def test_validation_in_bf16_measures_what_diffusers_computes_in_fp32(options, tmp_path, image_folder):
    diffusers_model("sd", *SMALL).save_pretrained(tmp_path / "theirs")
    given = {**options, "use_bf16": True, "init_from": str(tmp_path / "theirs"), "max_steps": 1}
    assert train(given) == 0
    theirs = AutoencoderKLOfDiffusers.from_pretrained(tmp_path / "run" / "vae")
    found = records(tmp_path / "run", "validation")[-1]
    assert found["precision"] == "fp32"
    with torch.no_grad():
        expected = psnr_of(lambda x: theirs.decode(theirs.encode(x).latent_dist.mode()).sample, image_folder)
    assert found["psnr"] == pytest.approx(expected, abs=1e-3)
