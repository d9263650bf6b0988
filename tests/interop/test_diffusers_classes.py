"""Networks that diffusers computes: read, trained, resumed, written, and refused."""

import copy
import json
import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.harness.diffusers_models import CONFIGS, build, latents_and_images
from tests.harness.runs import TINY, run_here, run_script
from tests.harness.small_vae import write_vae
from tests.harness.training_runs import (
    assert_same_result,
    assert_weights_close,
    last_checkpoint,
    train_on_two_processes,
)
from tests.harness.vae_families import image
from vae.config.resolve import SHAPE
from vae.config.trained_vae_flags import ExportConfig
from vae.inference.codec import MIN_LATENTS, decode_latents, encode_images, pad_to_multiple
from vae.interop.exporting import export
from vae.interop.vae_files import load_vae
from vae.interop.vae_path import WEIGHTS_NAME
from vae.model.autoencoder import RECOMPUTE_LEVELS, set_recompute
from vae.model.diffusers_autoencoder import build_autoencoder
from vae.system.errors import UserError
from vae.training.run import train

RUN = {name: value for name, value in TINY.items() if name not in (*SHAPE, "init", "val_freq", "num_epochs")}
RUN |= {"image_size": 64, "upscale": True, "num_steps": 5, "log_freq": 1, "val_split": 0.0}


@pytest.fixture(params=CONFIGS)
def theirs(request):
    return build(request.param)


@pytest.fixture
def given(theirs, image_folder, tmp_path):
    theirs.save_pretrained(tmp_path / "theirs")
    places = {"data_path": str(image_folder), "output_dir": str(tmp_path / "run")}
    return {**RUN, **places, "init_from": str(tmp_path / "theirs")}


def write(vae, output, **options) -> None:
    export(ExportConfig(vae=(str(vae),), output=str(output), **options))


def from_diffusers(folder, like):
    """The model that diffusers loads from a folder, with exactly the weights of the file."""
    how = {"low_cpu_mem_usage": False, "output_loading_info": True}
    model, loading = type(like).from_pretrained(folder, **how)
    assert not any(loading.values())
    return model.eval()


def test_reconstructions_and_exports_are_those_of_diffusers(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "theirs")
    write(tmp_path / "theirs", tmp_path / "folder")
    write(tmp_path / "theirs", tmp_path / "one.safetensors", dtype="bf16")
    images = torch.cat([image(64), image(64).flip(3)])[..., :32]
    latents, recon = latents_and_images(theirs, images)
    for path in ("theirs", "folder"):
        ours = load_vae(tmp_path / path).autoencoder
        assert torch.equal(ours.encode(images).mode(), latents)
        assert torch.equal(ours.decode(latents), recon)
    stored = load_file(tmp_path / "one.safetensors")
    assert stored.keys() == load_file(tmp_path / "theirs" / WEIGHTS_NAME).keys()
    assert load_vae(tmp_path / "one.safetensors").autoencoder.config == ours.config
    again = from_diffusers(tmp_path / "folder", theirs)
    assert torch.equal(latents_and_images(again, images)[1], recon)
    configs = [json.loads((tmp_path / path / "config.json").read_text()) for path in ("theirs", "folder")]
    for config in configs:
        del config["_diffusers_version"]
    assert configs[0] == configs[1]  # with the constants of its latents


@pytest.mark.slow
def test_the_decoder_is_trained_and_a_resumed_run_is_the_same(theirs, given, tmp_path):
    assert train({**given, "train_part": "decoder"}) == 0
    after = from_diffusers(tmp_path / "run" / "vae", theirs)
    weights, before = after.state_dict(), theirs.state_dict()
    changed = {name for name in before if not torch.equal(weights[name], before[name])}
    assert changed
    assert all(name.startswith(("decoder.", "post_quant_conv.")) for name in changed)
    latents, recon = latents_and_images(after, image())
    assert torch.equal(latents, latents_and_images(theirs, image())[0])
    ours = load_vae(tmp_path / "run" / "vae").autoencoder
    assert torch.equal(ours.decode(latents), recon)
    constants = ("scaling_factor", "latents_mean", "latents_std")
    assert all(after.config.get(name) == theirs.config.get(name) for name in constants)
    stopped = {**given, "output_dir": str(tmp_path / "stopped"), "train_part": "decoder"}
    assert train({**stopped, "max_steps": 2}) == 0
    assert train({"output_dir": stopped["output_dir"], "resume_from": "latest"}) == 0
    assert_same_result(tmp_path / "stopped", tmp_path / "run")


@pytest.mark.slow
def test_two_processes_train_what_one_does(theirs, given, tmp_path):
    """The whole network, whose latents are then measured."""
    given |= {"num_steps": 2, "learning_rate": 1e-4}
    assert train(given) == 0
    two = {**given, "output_dir": str(tmp_path / "two"), "batch_size": given["batch_size"] // 2}
    train_on_two_processes(two)
    assert_weights_close(*(last_checkpoint(tmp_path / folder) for folder in ("two", "run")))
    before, config = theirs.config, json.loads((tmp_path / "run" / "vae" / "config.json").read_text())
    if "scaling_factor" in config:
        assert config["scaling_factor"] != before["scaling_factor"]
    elif "latents_std" in config:
        assert config["latents_std"] != before["latents_std"]
    from_diffusers(tmp_path / "run" / "vae", theirs)


def test_recompute_levels_give_the_same_gradients(theirs, tmp_path):
    """In bf16, whose images are those of diffusers' module in bf16."""
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = load_vae(tmp_path / "theirs").autoencoder
    model = build_autoencoder(loaded.config)
    model.load_state_dict(loaded.state_dict())
    has_bf16 = type(theirs).__name__ != "AutoencoderKLCosmos"  # PyTorch has no avg_pool3d in bf16 on a CPU
    dtype = torch.bfloat16 if has_bf16 else torch.float32
    images = image().to(dtype)
    gradients = []
    for level in RECOMPUTE_LEVELS:
        set_recompute(model, level)
        model.zero_grad()
        recon, mean, _ = model(images)
        (recon.float().square().mean() + mean.square().mean()).backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert {p.grad.dtype for p in trained} == {torch.float32}
        gradients.append([p.grad.clone() for p in trained])
        assert all(map(torch.equal, gradients[-1], gradients[0])), level
    norms = [module for module in theirs.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    in_fp32 = copy.deepcopy(norms)
    expected = theirs.to(dtype)
    for norm, values in zip(norms, in_fp32, strict=True):
        norm.float().load_state_dict(values.state_dict())
    assert torch.equal(recon, latents_and_images(expected, images)[1])


def test_a_dtype_that_a_device_lacks_is_refused_in_a_line(tmp_path):
    build("AutoencoderKLCosmos").save_pretrained(tmp_path)
    model = load_vae(tmp_path).autoencoder
    with pytest.raises(UserError, match=r"^AutoencoderKLCosmos cannot compute in torch.bfloat16 on the cpu"):
        model.encode(image().to(torch.bfloat16))


def test_the_first_import_of_a_class_is_on_the_cpu(tmp_path):
    """Its module may begin with tensors, as that of Cosmos."""
    build("AutoencoderKLCosmos").save_pretrained(tmp_path / "theirs")
    words = ("--vae", str(tmp_path / "theirs"), "--output", str(tmp_path / "ours"))
    done = run_script("export_vae.py", *words)
    assert done.returncode == 0, done.stderr


def test_an_absent_diffusers_is_named(tmp_path, monkeypatch):
    build("AutoencoderDC").save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UserError, match=r"is missing: pip install diffusers$"):
        load_vae(tmp_path)


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("kl_weight", {"kl_weight": 1e-6}),
        ("decoder_scale", {"decoder_scale": 2, "train_part": "decoder"}),
        ("decoder_channels", {"profile": "small-decoder"}),
        ("image_channels", {"image_channels": 4}),
        ("padding", {"padding": "reflect"}),
        ("init", {"init": "warm"}),
        ("kernels", {"kernels": "triton"}),
        ("image_size", {"image_size": 60}),
        ("family", {"family": "kl"}),
        ("module", {"module": "{}"}),
    ],
)
def test_mistakes_name_their_flag(flag, options, image_folder, tmp_path):
    build("AutoencoderDC").save_pretrained(tmp_path / "theirs")
    given = {**RUN, "data_path": str(image_folder), "output_dir": str(tmp_path / "run")}
    with pytest.raises(UserError, match=rf"^--{flag}\b"):
        train({**given, "init_from": str(tmp_path / "theirs"), **options})


def test_a_new_network_of_diffusers_is_refused(image_folder, tmp_path):
    given = {**RUN, "data_path": str(image_folder), "output_dir": str(tmp_path / "run")}
    with pytest.raises(UserError, match=r"^--family diffusers needs trained weights"):
        train({**given, "family": "diffusers"})


@pytest.mark.parametrize("name", ["AutoencoderOobleck", "VQModel"])
def test_other_classes_are_refused_by_name(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": name}))
    save_file({"decoder.conv_in.weight": torch.zeros(1)}, tmp_path / WEIGHTS_NAME)
    with pytest.raises(UserError, match=rf"is for {name}, but only .*AutoencoderDC"):
        load_vae(tmp_path)


def test_a_wrong_configuration_is_refused_in_a_line(tmp_path):
    build("AutoencoderDC").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"encoder_block_types": "Other"}))
    with pytest.raises(UserError, match=r"cannot build its AutoencoderDC: .*Other"):
        load_vae(tmp_path)
    path.write_text(json.dumps(config | {"latent_channels": 4}))
    with pytest.raises(UserError, match=r"another shape of decoder.conv_in.weight"):
        load_vae(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AutoencoderDC", "AutoencoderKLWan"])
def test_images_of_any_size_are_encoded_and_decoded(name, tmp_path):
    """Padded to multiples of the downsampling, and cut; in tiles, which see less of the image."""
    theirs = build(name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_vae(tmp_path / "theirs").autoencoder
    images = image(384)[:, :, :270, :371]
    padded = pad_to_multiple(images, ours.downsampling)
    latents, recon = latents_and_images(theirs, padded)
    mode = encode_images(ours, images).mode()
    whole = decode_latents(ours, mode, (270, 371))
    assert (mode - latents).abs().max() <= 1e-4 * latents.abs().max()  # another memory layout
    assert (whole - recon[:, :, :270, :371]).abs().max() < 1e-4
    tiled = decode_latents(ours, mode, (270, 371), tile=ours.downsampling * MIN_LATENTS)
    assert 0 < (tiled - whole).square().mean() < 0.1 * whole.var()  # random weights; one tile has a fifth


@pytest.mark.slow
def test_a_network_of_diffusers_is_measured_beside_others(image_folder, tmp_path):
    build("AutoencoderDC").save_pretrained(tmp_path / "dc")
    write_vae(tmp_path / "own")
    vaes = ("--vae", tmp_path / "dc", tmp_path / "own", "--data_path", image_folder, "--device", "cpu")
    words = (*vaes, "--output_dir", tmp_path / "out", "--sizes", "40", "--perceptual_net", "none")
    assert run_here("evaluate_vae.py", *words).returncode == 0
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["vaes"][:2]
    facts = [row["latents"] for row in rows]
    assert [fact["channels"] for fact in facts] == [8, 16]
    assert facts[0]["kl_nats_per_pixel"] is None
    assert facts[1]["kl_nats_per_pixel"] > 0
    words = ("--vae", tmp_path / "dc", "--input", image_folder, "--output_dir", tmp_path / "z")
    assert run_here("infer_vae.py", *words, "--mode", "encode", "--device", "cpu").returncode == 0
    words = ("--vae", tmp_path / "dc", "--input", tmp_path / "z", "--output_dir", tmp_path / "images")
    assert run_here("infer_vae.py", *words, "--mode", "decode", "--device", "cpu").returncode == 0
    with Image.open(tmp_path / "images" / "image_00.png") as decoded:
        assert decoded.size == (48, 40)
