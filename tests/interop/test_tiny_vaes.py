"""AutoencoderTiny with its encoder: read, distilled from a teacher, and written for diffusers."""

import json
import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny
from safetensors.torch import load_file, save_file

from tests.harness.runs import TINY, run_here
from tests.harness.small_vae import SMALL, write_vae
from tests.harness.tiny_models import published
from tests.harness.training_runs import assert_same, last_checkpoint, records
from tests.harness.vae_families import diffusers_model, image
from tests.harness.wan_models import wan_model
from vae.config.model_options import ModelConfig
from vae.config.options import LossConfig
from vae.config.resolve import tiny_shape
from vae.config.trained_vae_flags import ExportConfig
from vae.interop.exporting import export
from vae.interop.teacher import terms_of
from vae.interop.vae_files import load_vae
from vae.interop.vae_path import WEIGHTS_NAME
from vae.model.autoencoder import RECOMPUTE_LEVELS, AutoencoderKL, set_recompute
from vae.system.errors import UserError
from vae.training.early_checks import check_command
from vae.training.run import train

RUN = {name: TINY[name] for name in ("batch_size", "perceptual_weight", "num_workers", "val_split", "device")}
RUN |= {"save_samples_freq": 0, "image_size": 32, "num_epochs": 1, "max_steps": 3, "ema_decay": 0.0}


@pytest.fixture
def teacher(tmp_path):
    model = diffusers_model("sd", (32, 32), 1)
    model.register_to_config(scaling_factor=4.0)  # latents of about 1
    model.save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


SCALING = {"vae_scale": torch.tensor(0.18215), "vae_shift": torch.tensor(0.0)}


def half_of(part, whole):
    """A file of its own with one part of taesd."""
    names = [name for name in whole if name.startswith(f"{part}.")]
    return {name.removeprefix(f"{part}."): whole[name] for name in names}


def theirs(levels=4, **shape):
    torch.manual_seed(3)
    widths, more = (64,) * levels, (3,) * (levels - 1)
    blocks = {"num_encoder_blocks": (1, *more), "num_decoder_blocks": (*more, 1)}
    return AutoencoderTiny(
        encoder_block_out_channels=widths, decoder_block_out_channels=widths, **blocks, **shape
    ).eval()


def train_tiny(image_folder, folder, **options):
    assert train({**RUN, "data_path": str(image_folder), "output_dir": str(folder), **options}) == 0


def load_quietly(folder, caplog):
    """The model that diffusers loads from a folder without a warning."""
    with caplog.at_level(logging.WARNING, logger="diffusers"):
        how = {"low_cpu_mem_usage": False, "output_loading_info": True}
        model, loading = AutoencoderTiny.from_pretrained(folder, **how)
    assert not any(loading.values())
    assert not caplog.records
    return model.eval()


def assert_same_function(ours, model):
    with torch.no_grad():
        latents = model.encode(image()).latents
        assert (ours.encode(image()).mode() - latents).abs().max() < 1e-5
        sample = ours.encode(image()).sample(torch.ones_like(latents))
        assert (sample - latents).abs().max() < 1e-5  # it has no variance
        wide = 4 * latents / latents.std()  # some are beyond the limit of 3
        assert (ours.decode(wide) - model.decode(wide).sample).abs().max() < 1e-5


@pytest.mark.parametrize("levels", [2, 4])
def test_a_folder_and_its_exports_are_the_same_network(levels, tmp_path, caplog):
    model = theirs(levels)
    model.save_pretrained(tmp_path / "a")
    for output in ("folder", "one.safetensors"):
        export(ExportConfig(vae=(str(tmp_path / "a"),), output=str(tmp_path / output)))
    assert_same(load_quietly(tmp_path / "folder", caplog).state_dict(), model.state_dict(), "folder")
    for name in ("a", "folder", "one.safetensors"):
        loaded = load_vae(tmp_path / name)
        assert_same_function(loaded.autoencoder, model)
        assert (loaded.scaling_factor, loaded.shift_factor) == (1.0, 0.0)
    assert loaded.autoencoder.state_dict().keys() == model.state_dict().keys()


class Taesd(torch.nn.Module):
    """The modules of the published code with the weights of `model`, and the names that follow from them."""

    def __init__(self, model):
        super().__init__()
        self.encoder = model.encoder.layers
        self.decoder = torch.nn.Sequential(torch.nn.Identity(), *model.decoder.layers)


LAYOUTS = {  # files by name, of the state_dict of a Taesd
    "whole.pth": lambda whole: whole,
    "combined.pth": lambda whole: {f"taesd_{name}": value for name, value in whole.items()} | SCALING,
    "taesd_encoder.safetensors": partial(half_of, "encoder"),
    "taesd_decoder.safetensors": partial(half_of, "decoder"),
}


@pytest.mark.parametrize("z_channels", [4, 16])
def test_published_files_of_taesd_are_read(z_channels, tmp_path):
    model = theirs(latent_channels=z_channels)
    whole = Taesd(model).state_dict()
    for name, layout in LAYOUTS.items():
        save = torch.save if name.endswith(".pth") else save_file
        save(layout(whole), tmp_path / name)
    for name in LAYOUTS:  # a half is read with the other one beside it
        assert_same_function(load_vae(tmp_path / name).autoencoder, model)
    (tmp_path / "taesd_decoder.safetensors").unlink()
    encoder = load_vae(tmp_path / "taesd_encoder.safetensors", needs=("encoder",)).autoencoder
    assert torch.equal(
        encoder.encode(image()).mode(), load_vae(tmp_path / "whole.pth").autoencoder.encode(image()).mode()
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["taef2", "taesana"])
def test_variants_are_read_trained_and_written(family, image_folder, tmp_path):
    parts = {part: published(family, part) for part in ("encoder", "decoder")}
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for part, network in parts.items():
        torch.save({name: w.half() for name, w in network.state_dict().items()}, theirs / f"x_{part}.pth")
        network.half().float()
    train_tiny(image_folder, tmp_path / "run", init_from=str(theirs), train_part="decoder")
    export(ExportConfig(vae=(str(theirs / "x_decoder.pth"),), output=str(tmp_path / "all.safetensors")))
    images = image() / 2 + 0.5
    for path in (theirs, tmp_path / "all.safetensors", tmp_path / "run/vae"):
        loaded = load_vae(path)
        ours = loaded.autoencoder
        assert (ours.config.family, loaded.scaling_factor) == (family, 1.0)
        for part, network in parts.items():
            file = tmp_path / f"{path.name}_{part}.safetensors"
            export(ExportConfig(vae=(str(path),), output=str(file)))
            stored, expected = load_file(file), network.state_dict()
            is_trained = path.name == "vae" and part == "decoder"
            assert is_trained != all(torch.equal(value, expected[name]) for name, value in stored.items())
            network.load_state_dict(stored)  # the names are those of the published code
        latents = parts["encoder"](images)
        assert (ours.encode(image()).mode() - latents).abs().max() < 1e-5
        latents *= 4 / latents.std()
        assert (ours.decode(latents) - (2 * parts["decoder"](latents) - 1)).abs().max() < 1e-5


def test_only_the_two_files_of_one_tiny_vae_in_a_folder_are_read(tmp_path):
    for name in ("a_encoder", "a_decoder", "b_encoder"):
        torch.save(published("taef2", name[2:]).state_dict(), tmp_path / f"{name}.pth")
    assert load_vae(tmp_path).autoencoder.config.family == "taef2"
    torch.save({}, tmp_path / "b_decoder.pth")
    with pytest.raises(UserError, match=r"has no .*: give a file in it, such as a_decoder.pth$"):
        load_vae(tmp_path)


@pytest.mark.parametrize("half", ["encoder", "decoder"])
def test_the_name_of_an_export_chooses_a_half(half, tmp_path):
    model = theirs()
    model.save_pretrained(tmp_path / "a")
    output = tmp_path / f"taesd_{half}.safetensors"
    export(ExportConfig(vae=(str(tmp_path / "a"),), output=str(output), dtype="fp16"))
    weights = half_of(half, Taesd(model).state_dict())
    expected = {name: weights[name].half() for name in sorted(weights)}
    assert_same(dict(sorted(load_file(output).items())), expected, half)


def test_comfyui_returns_the_latents_of_the_diffusion_model(tmp_path, capsys):
    model = theirs()
    model.save_pretrained(tmp_path / "a")
    given = {"vae": (str(tmp_path / "a"),), "output": str(tmp_path / "one.safetensors")}
    export(ExportConfig(**given))
    assert "needs the scaling of the diffusion model" in capsys.readouterr().out
    export(ExportConfig(**given, overwrite=True, scaling_factor=0.5, shift_factor=0.25))
    stored = load_file(tmp_path / "one.safetensors")
    scale, shift = stored.pop("vae_scale"), stored.pop("vae_shift")
    assert (scale, shift) == (0.5, 0.25)
    # its VAE returns latents as those of other VAEs, which the diffusion model then scales
    latents = model.encode(image()).latents
    torch.testing.assert_close(((latents / scale + shift) - 0.25) * 0.5, latents)
    assert stored.keys() == {f"taesd_{name}" for name in Taesd(model).state_dict()}
    loaded = load_vae(tmp_path / "one.safetensors")
    assert_same_function(loaded.autoencoder, model)
    assert loaded.scaling_factor == 1.0
    for output in ("folder", "taesd_decoder.safetensors"):
        with pytest.raises(UserError, match=r"^--scaling_factor: .* has the latents of others: omit it$"):
            export(ExportConfig(vae=given["vae"], output=str(tmp_path / output), scaling_factor=0.5))


@pytest.mark.slow
def test_student_learns_the_latents_and_images_of_its_teacher(teacher, image_folder, tmp_path, caplog):
    given = {"family": "tiny", "teacher": str(teacher), "max_steps": 40, "num_epochs": 20, "log_freq": 1}
    train_tiny(image_folder, tmp_path / "run", **given, learning_rate=1e-3)
    trained = load_vae(tmp_path / "run/vae").autoencoder
    assert_same_function(trained, load_quietly(tmp_path / "run/vae", caplog))
    losses = records(tmp_path / "run", "train")
    assert "kl" not in losses[0]  # it has no posterior
    for name in ("teacher", "reconstruction"):
        assert losses[-1][name] < 0.7 * losses[0][name], name
    config = json.loads((tmp_path / "run/vae/config.json").read_text())
    assert config["scaling_factor"] == 1.0
    assert "sample_size" not in config
    # the trained weights alone begin another run, of their decoder
    train_tiny(image_folder, tmp_path / "next", init_from=str(tmp_path / "run/vae"), train_part="decoder")
    after = load_vae(tmp_path / "next/vae").autoencoder
    assert torch.equal(after.encode(image()).mode(), trained.encode(image()).mode())
    assert not torch.equal(after.decoder.layers[0].weight, trained.decoder.layers[0].weight)
    words = ("--input", image_folder, "--output_dir", tmp_path / "z", "--device", "cpu")
    assert run_here("infer_vae.py", "--vae", tmp_path / "run/vae", "--mode", "encode", *words).returncode == 0


@pytest.mark.slow
def test_a_resumed_run_equals_one_without_a_stop_and_micro_batches_change_nothing(
    teacher, image_folder, tmp_path
):
    given = {"family": "tiny", "teacher": str(teacher)}
    train_tiny(image_folder, tmp_path / "whole", **given)
    train_tiny(image_folder, tmp_path / "stopped", **given, max_steps=1)
    resumed = {"output_dir": str(tmp_path / "stopped"), "resume_from": "latest", "max_steps": 3}
    assert train(resumed) == 0
    whole = last_checkpoint(tmp_path / "whole")["model"]
    assert_same(whole, last_checkpoint(tmp_path / "stopped")["model"], "resumed")
    theirs(levels=3).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"^--teacher .* but the file of --resume_from has 4 and 2"):
        train({**resumed, "max_steps": 4, "teacher": str(tmp_path / "other")})
    train_tiny(image_folder, tmp_path / "cut", **given, micro_batch_size=1)
    for name, value in last_checkpoint(tmp_path / "cut")["model"].items():
        # Adam's first steps are about the learning rate, whatever the gradient: 3e-4 each
        assert (value - whole[name]).abs().max() < 2e-3, name


def test_the_teacher_decides_which_image_sizes_fit(teacher, image_folder, tmp_path):
    """It has two levels, and a network that is not of its shape four."""
    folders = {"data_path": (str(image_folder),), "output_dir": str(tmp_path / "run")}
    check_command({"family": "tiny", "teacher": str(teacher), "image_size": 34, **folders})
    assert train(folders | {**RUN, "family": "tiny", "teacher": str(teacher), "image_size": 34}) == 0


@pytest.mark.parametrize("family", ["sd", "sd3", "wan", "flux2"])
def test_latents_of_the_teacher_are_those_of_diffusion_models(family, tmp_path):
    model = wan_model() if family == "wan" else diffusers_model(family, (32, 32), 1)
    model.save_pretrained(tmp_path / "vae")
    loss = LossConfig(perceptual_weight=0.0, teacher=str(tmp_path / "vae"), teacher_weight=2.0)
    (term,) = terms_of(loss, False, torch.float32, "cpu").teacher
    loaded = load_vae(tmp_path / "vae")
    latents = loaded.autoencoder.encode(image()).mode()
    if family in ("sd", "sd3"):
        expected = (latents - (loaded.shift_factor or 0)) * loaded.scaling_factor
    else:
        norm = loaded.autoencoder.bn
        expected = F.pixel_shuffle(norm.normalize(latents), norm.patch)
    torch.testing.assert_close(term.function(image()), expected)
    assert term.weight == 2.0
    (planned,) = terms_of(loss, False, torch.float32, "meta").networks()
    sizes = [sum(p.nbytes for p in network.parameters()) for network in (planned, term.function)]
    assert sizes[0] == sizes[1]


def test_a_teacher_with_large_activations_computes_in_fp16(tmp_path):
    model = diffusers_model("sd", (32, 32), 1)
    model.encoder.conv_in.weight.data *= 1e6
    model.save_pretrained(tmp_path / "vae")
    loss = LossConfig(perceptual_weight=0.0, teacher=str(tmp_path / "vae"))
    full, half = (
        terms_of(loss, False, dtype, "cpu").teacher[0].function(image().to(dtype)).float()
        for dtype in (torch.float32, torch.float16)
    )
    assert (half - full).abs().max() < 0.05 * full.abs().max()  # without a scale it is not finite


@pytest.mark.parametrize("level", RECOMPUTE_LEVELS)
def test_recompute_levels_give_the_same_gradients(level):
    torch.manual_seed(0)
    model = AutoencoderKL(ModelConfig(**tiny_shape(4, 3, "taef2")))
    x = image(32)
    gradients = []
    for name in ("none", level):
        set_recompute(model, name)
        model.zero_grad()
        model(x)[0].square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("family", {"family": "taesana", "teacher": "T"}),  # has more levels
        ("family", {"family": "tiny"}),
        ("decoder", {"init_from": "tiny", "train_part": "decoder", "decoder": "tiny"}),
        ("teacher", {"family": "tiny", "teacher": "grey"}),
        ("teacher", {"family": "tiny", "teacher": "missing"}),
    ],
)
def test_mistakes_name_their_flag(flag, options, teacher, image_folder, tmp_path):
    write_vae(tmp_path / "grey", shape=replace(SMALL, image_channels=1))
    theirs().save_pretrained(tmp_path / "tiny")
    paths = {"tiny": tmp_path / "tiny", "T": teacher, "grey": tmp_path / "grey"}
    given = dict(options)
    for name in {"init_from", "teacher"} & options.keys():
        given[name] = str(paths.get(options[name], options[name]))
    with pytest.raises(UserError, match=rf"^--{flag}\b"):
        train_tiny(image_folder, tmp_path / "run", **given)


def test_files_that_are_no_whole_taesd_are_refused(tmp_path):
    model = theirs()
    folder = tmp_path / "a"
    model.save_pretrained(folder)
    weights = load_file(folder / WEIGHTS_NAME)
    save_file({n: v for n, v in weights.items() if n.startswith("decoder.")}, tmp_path / "b.safetensors")
    weights["encoder.layers.1.skip.weight"] = torch.zeros(64, 64, 1, 1)
    save_file(weights, tmp_path / "c.safetensors")
    with pytest.raises(UserError, match=r"^--fold_scaling"):
        export(ExportConfig(vae=(str(folder),), output=str(tmp_path / "d"), fold_scaling="flux"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"act_fn": "silu"}))
    for path, part in (
        (tmp_path / "b.safetensors", "encoder"),
        (tmp_path / "c.safetensors", r"encoder\.layers\.1\.skip"),
        (folder, "silu"),
    ):
        with pytest.raises(UserError, match=part):
            load_vae(path)
