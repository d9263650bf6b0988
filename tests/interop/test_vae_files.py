"""Every supported VAE file is recognised; an unusable one is a one-line error with its likely cause."""

import json
import os
import re
import struct
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.checkpoints import checkpoint as checkpoint_content
from tests.harness.small_vae import write_vae
from tests.harness.vae_families import FAMILIES, SMALL, diffusers_model, image, research_model, save_research
from vae.config.options import build
from vae.interop.checkpoint_file import save_checkpoint
from vae.interop.vae_files import load_vae, read_vae
from vae.interop.vae_path import WEIGHTS_NAME
from vae.model.autoencoder import AutoencoderKL
from vae.system.errors import EXIT_CONFIG, UserError


def error_of(path, **options) -> str:
    with pytest.raises(UserError) as caught:
        load_vae(path, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"--vae {path}"), text
    assert caught.value.exit_code == EXIT_CONFIG
    return text


# --- recognised files ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_diffusers_folder_is_read_completely(family, tmp_path):
    theirs = diffusers_model(family, *SMALL)
    theirs.save_pretrained(tmp_path / "vae")
    loaded = load_vae(tmp_path)  # the folder of a pipeline
    z, quant, scaling, shift = FAMILIES[family]
    config = loaded.autoencoder.config
    assert (config.z_channels, config.use_quant_conv, config.latent_norm) == (
        z,
        quant is not None,
        family == "flux2",
    )
    assert loaded.kind == "diffusers"
    assert loaded.scaling_factor == scaling
    assert loaded.shift_factor == (None if scaling is None else shift or 0.0)
    assert loaded.file.sample_size == 64
    assert not loaded.autoencoder.training
    assert not any(p.requires_grad for p in loaded.autoencoder.parameters())


@pytest.mark.parametrize("prefix", ["", "first_stage_model.", "module.vae._orig_mod."])
def test_prefix_is_removed_and_other_tensors_are_ignored(prefix, tmp_path):
    theirs = research_model("sd", *SMALL)
    more = {
        f"{prefix}loss.discriminator.main.0.weight": torch.zeros(3),
        f"{prefix}model_ema.decay": torch.tensor(0.999),
        f"{prefix}model_ema.encoderconv_inweight": torch.zeros(3),
    }
    if prefix:
        more["model.diffusion_model.input_blocks.0.0.weight"] = torch.zeros(3)
    # with any name: the content decides
    loaded = load_vae(save_research(tmp_path / "model.safetensors.download", theirs, prefix, more))
    assert loaded.kind == "compvis"
    latents = theirs.encode(image())
    assert (loaded.autoencoder.decode(latents) - theirs.decode(latents)).abs().max() < 1e-5


def test_scaling_follows_from_other_networks_in_the_file(tmp_path):
    theirs = research_model("sd", *SMALL)
    for index, (other_name, scaling) in enumerate(
        {
            "conditioner.embedders.0.weight": (0.13025, 0.0),
            "cond_stage_model.transformer.weight": (0.18215, 0.0),
            "model.diffusion_model.joint_blocks.0.weight": (1.5305, 0.0609),
            "model.diffusion_model.double_blocks.0.weight": (0.3611, 0.1159),
            "model.diffusion_model.something.weight": (None, None),
        }.items()
    ):
        path = tmp_path / f"{index}.safetensors"
        loaded = load_vae(save_research(path, theirs, "first_stage_model.", {other_name: torch.zeros(1)}))
        assert (loaded.scaling_factor, loaded.shift_factor) == scaling, other_name


def test_fp16_variant_of_weights_is_found(tmp_path):
    diffusers_model("sd", *SMALL).half().save_pretrained(tmp_path, variant="fp16")
    loaded = load_vae(tmp_path)
    assert loaded.file.dtype == torch.float16
    assert {p.dtype for p in loaded.autoencoder.parameters()} == {torch.float32}


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint with different raw weights and EMA weights."""
    content = checkpoint_content(12)
    raw, ema = (AutoencoderKL(build(content["config"]).model) for _ in range(2))
    content |= {"model": raw.state_dict(), "ema": ema.state_dict()}
    content["stages"] += [{**content["stages"][0], "first_epoch": 2, "image_size": 64}]  # planned, not begun
    save_checkpoint(tmp_path / "checkpoint_epoch_1.pt", content)
    return tmp_path / "checkpoint_epoch_1.pt", raw, ema


@pytest.mark.parametrize("which", ["ema", "raw"])
def test_weights_option_selects_ema_or_raw(checkpoint, which):
    path, raw, ema = checkpoint
    loaded = load_vae(path, weights=which)
    expected = {"raw": raw, "ema": ema}[which].state_dict()
    for name, value in loaded.autoencoder.state_dict().items():
        assert torch.equal(value, expected[name])
    assert (loaded.kind, loaded.file.step, loaded.file.sample_size) == ("checkpoint", 12, 32)
    assert loaded.scaling_factor is None


def test_checkpoint_without_ema_gives_raw_weights(checkpoint):
    path, raw, _ = checkpoint
    content = torch.load(path, weights_only=True)
    save_checkpoint(path, {**content, "ema": None, "latent_scaling": [0.5, 0.25]})
    loaded = load_vae(path)
    assert torch.equal(loaded.autoencoder.encoder.conv_in.weight, raw.encoder.conv_in.weight)
    assert (loaded.scaling_factor, loaded.shift_factor) == (0.5, 0.25)


# --- refused files ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decoder.layers.0.weight", "TAESD"),
        ("encoder.downsamples.0.downsamples.0.residual.0.gamma", "the VAE of Wan 2.2"),
        ("model.diffusion_model.input_blocks.0.0.weight", "diffusion model without its VAE"),
        ("something.weight", "first names: something.weight"),
    ],
)
def test_other_network_is_reported_by_its_kind(name, kind, tmp_path):
    save_file({name: torch.zeros(2)}, tmp_path / "model.safetensors")
    assert kind in error_of(tmp_path / "model.safetensors")


def drop(pattern):
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if pattern in name]


def put(name, value):
    return lambda tensors: tensors.update({name: value})


def time_axis(tensors):
    for name, value in tensors.items():
        if value.dim() == 4:
            tensors[name] = value[:, :, None].contiguous()


def four_channels(tensors):
    tensors["encoder.conv_in.weight"] = torch.zeros(32, 4, 3, 3)


def other_decoder(tensors):
    tensors["decoder.conv_in.weight"] = torch.zeros(96, 4, 3, 3)


CONV, CONV_READ = "encoder.down.1.block.0.conv1.weight", "encoder.down_blocks.1.resnets.0.conv1.weight"


def transposed(tensors):
    tensors[CONV] = tensors[CONV].permute(0, 2, 3, 1).contiguous()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop("decoder."), r"has no decoder: it can only encode images \(infer_vae.py --mode encode\)"),
        (drop("encoder."), r"has no encoder: it can only decode latents \(infer_vae.py --mode decode\)"),
        (drop("decoder.up.1"), r"lacks some of decoder.up_blocks: it is no whole VAE, or of another"),
        (drop("post_quant_conv"), r'lacks post_quant_conv\S+ and 1 more'),
        (drop("encoder.mid.attn_1"), r'lacks encoder.mid_block.attentions'),
        (put("encoder.down.1.attn.0.q.weight", torch.zeros(1)), r'has the unknown encoder.down\S+attn'),
        (put("encoder.extra.weight", torch.zeros(1)), r'has the unknown encoder.extra.weight$'),
        (time_axis, "video VAE"),
        (four_channels, "another shape of encoder.conv_in.weight$"),
        (other_decoder, "another shape of decoder.conv_in.weight"),
        (put("decoder.conv_out.bias", torch.full((3,), torch.nan)), "not finite .*decoder.conv_out"),
        (put("decoder.conv_out.bias", torch.zeros(3).to(torch.float8_e4m3fn)), "float8_e4m3fn weights"),
        (drop("encoder.down.0.block.0.conv1.weight"), "lacks some of encoder.down_blocks"),
        (transposed, f"another shape of {CONV_READ}"),
        (put(CONV, torch.tensor(1.0)), "another shape of encoder.down_blocks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_unusable_tensors_are_named(edit, message, tmp_path):
    tensors = {name: value.contiguous() for name, value in research_model("sd", *SMALL).state_dict().items()}
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    text = error_of(tmp_path / "model.safetensors")
    assert re.search(message, text), text
    assert len(text) < 400


def test_half_a_download_is_reported(tmp_path):
    path = save_research(tmp_path / "model.safetensors", research_model("sd", *SMALL))
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 100, 4, 0):
        path.write_bytes(whole[:size])
        assert "download it again" in error_of(path), size
    for size in (1000, len(whole) // 2):  # of a program that reserves the space first
        path.write_bytes(whole[:size] + bytes(len(whole) - size))
        assert "only part of it was downloaded" in error_of(path), size


def test_damaged_header_is_a_one_line_error(tmp_path):
    path = tmp_path / "model.safetensors"
    for header in (
        b"{",
        b"[]",
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b"\xff\xfe",
    ):
        path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
        assert "download it again" in error_of(path)


def research_tensors(**more) -> dict:
    return dict(research_model("sd", *SMALL).state_dict()) | more


WRITERS = {
    "lightning.ckpt": lambda t: {"state_dict": t, "epoch": 3, "optimizer_states": [{"state": {}}]},
    "bare.pt": lambda t: t,
    "legacy.bin": lambda t: {f"first_stage_model.{n}": v for n, v in t.items()},
    "compiled.pth": lambda t: {"model": {f"module._orig_mod.{n}": v for n, v in t.items()}},
    "parts.pt": lambda t: {
        part: {n.removeprefix(f"{part}."): v for n, v in t.items() if n.startswith(f"{part}.")}
        for part in ("encoder", "decoder", "quant_conv", "post_quant_conv")
    },
    "inside.pt": lambda t: {n.replace("coder.", "coder._orig_mod.", 1): v for n, v in t.items()},
    "pickle.safetensors": lambda t: t,
}


@pytest.mark.parametrize("name", WRITERS)
def test_pickles_are_read_by_their_content(name, tmp_path):
    theirs = research_model("sd", *SMALL)
    torch.save(
        WRITERS[name](dict(theirs.state_dict())),
        tmp_path / name,
        _use_new_zipfile_serialization=not name.startswith("legacy"),
    )
    loaded = load_vae(tmp_path / name)
    assert loaded.kind == "compvis"
    latents = theirs.encode(image())
    assert (loaded.autoencoder.decode(latents) - theirs.decode(latents)).abs().max() < 1e-5


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode")
def test_names_of_any_bytes_are_read(tmp_path):
    folder = tmp_path / "caf\udce9"
    write_vae(folder)
    own = load_vae(folder).autoencoder.state_dict()
    with open(folder / "own.pt", "wb") as file:
        torch.save(own, file)
    for path in (folder / WEIGHTS_NAME, folder / "own.pt"):
        read = read_vae(path).weights
        assert all(value.equal(read[name]) for name, value in own.items())


def test_ema_weights_of_a_training_file_are_one_vae_and_two_vaes_are_an_error(tmp_path):
    path = tmp_path / "model.ckpt"
    raw, ema = research_tensors(), {n: v + 1 for n, v in research_tensors().items()}
    torch.save({"state_dict": raw, "ema_state_dict": ema}, path)
    for weights, expected in (("raw", raw), ("ema", ema)):
        loaded = load_vae(path, weights=weights).autoencoder
        assert torch.equal(loaded.encoder.conv_in.weight, expected["encoder.conv_in.weight"])
    torch.save({"student": raw, "teacher": ema}, path)
    assert "contains two VAEs, as student.* and teacher.*" in error_of(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of Git LFS"),
        (b"\n<html lang=en>", "web page"),
        (b"GGUF", "is not a .safetensors file"),
        (b"PK\x03\x04" + bytes(500), "only part of it was downloaded"),
        (b"", "not all of it: download it again"),
    ],
)
def test_what_is_no_file_of_weights_is_named(content, message, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert message in error_of(tmp_path / "model.safetensors")
    edited_config(tmp_path / "folder")
    (tmp_path / "folder" / WEIGHTS_NAME).write_bytes(content)
    assert message in error_of(tmp_path / "folder")


def test_sharded_folders_and_folders_without_a_class_are_read(tmp_path):
    theirs = diffusers_model("sd", *SMALL)
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    parts = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(parts) > 1
    assert load_vae(tmp_path / "sharded").scaling_factor == 0.18215
    assert "one of several parts" in error_of(parts[0])
    parts[1].unlink()
    assert f"its part {parts[1].name} is missing" in error_of(tmp_path / "sharded")
    folder = edited_config(tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    del config["_class_name"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_vae(folder).scaling_factor == 0.18215


def test_malicious_pickle_is_not_executed(tmp_path):
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save(Malicious(), tmp_path / "model.pt")
    assert re.search("pickle|damaged", error_of(tmp_path / "model.pt"))
    assert not (tmp_path / "ran").exists()


def test_run_without_export_suggests_its_checkpoints(checkpoint):
    path, _, _ = checkpoint
    assert "give one of the checkpoints" in error_of(path.parent)
    assert "no such file" in error_of(path.parent / "nothing")
    (path.parent / "metrics.jsonl").touch()
    assert "--resume_from latest" in error_of(path.parent / "vae")


def edited_config(tmp_path, **values):
    diffusers_model("sd", *SMALL).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return tmp_path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scaling_factor": "abc"}, "scaling_factor in config.json is not a number: abc"),
        (
            {"scaling_factor": 1.0, "shift_factor": [0.5]},
            "shift_factor in config.json is not a number: [0.5]",
        ),
        ({"scaling_factor": 10**400}, "scaling_factor in config.json is not a number: 1000"),
        ({"norm_num_groups": 0}, "config.json"),
        ({"_class_name": "VQModel"}, "config.json"),
    ],
)
def test_invalid_config_is_a_one_line_error(values, message, tmp_path):
    assert message in error_of(edited_config(tmp_path, **values))
    (tmp_path / "config.json").write_text("[1, 2]")
    assert "config.json" in error_of(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_NAME)
    save_file(tensors, tmp_path / "one.safetensors", metadata={"vae_config": "{"})
    assert "vae_config" in error_of(tmp_path / "one.safetensors")


@pytest.mark.parametrize(
    "name",
    ["encoder.down_blocks.999999999.resnets.0.conv1.weight", "encoder.down.2.block.99999999.conv1.weight"],
)
def test_small_file_cannot_cause_a_large_allocation(name, tmp_path):
    tensors = {name: value.contiguous() for name, value in research_model("sd", *SMALL).state_dict().items()}
    save_file({**tensors, name: torch.zeros(32, 32, 3, 3)}, tmp_path / "model.safetensors")
    assert "lacks some of encoder.down_blocks" in error_of(tmp_path / "model.safetensors")
    width = "encoder.down.1.block.0.conv1.weight"
    save_file({**tensors, width: torch.zeros(3_200_000, 1, 1, 1)}, tmp_path / "wide.safetensors")
    assert "is of another architecture" in error_of(tmp_path / "wide.safetensors")
