"""The images of Wan 2.1 and Qwen-Image: read as a 2-D network, trained, and put back into the video VAE."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.runs import TINY
from tests.harness.vae_families import image
from tests.harness.wan_models import CLASSES, official_weights, one_frame, wan_model
from vae.config.trained_vae_flags import ExportConfig
from vae.interop.exporting import export
from vae.interop.families import WAN_MEAN, WAN_STD
from vae.interop.vae_files import load_vae
from vae.interop.vae_path import WEIGHTS_NAME
from vae.system.errors import UserError
from vae.training.run import train

# without what the file of --init_from says
RUN = {name: value for name, value in TINY.items() if name not in ("channels", "norm_groups")}
RUN = {name: value for name, value in RUN.items() if name not in ("layers_per_block", "z_channels")}


def write(vae, output, **options) -> None:
    export(ExportConfig(vae=(str(vae),), output=str(output), **options))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()  # fp32


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("form", ["folder", "official", "official in 2-D"])
def test_latents_and_images_are_those_of_one_frame(cls, form, tmp_path):
    theirs = wan_model(cls)
    path = tmp_path / "vae.safetensors"
    if form == "folder":
        path = tmp_path / "vae"
        theirs.save_pretrained(path)
    else:
        weights = official_weights(theirs)
        if form == "official in 2-D":
            weights = {n: v[:, :, -1].contiguous() if v.dim() == 5 else v for n, v in weights.items()}
        save_file(weights, path)
    latents, recon = one_frame(theirs, image())
    loaded = load_vae(path)
    model = loaded.autoencoder
    assert_near(model.encode(image()).mode(), latents)
    assert_near(model.decode(latents).clamp(-1, 1), recon)
    assert loaded.scaling_factor is None
    mean, std = (torch.tensor(values)[:, None, None] for values in (WAN_MEAN, WAN_STD))
    assert_near(model.bn.normalize(latents), (latents - mean) / std)


def test_statistics_of_a_folder_are_kept(tmp_path):
    mean, std = [0.1 * n for n in range(4)], [1.0 + n for n in range(4)]
    wan_model(z_dim=4, latents_mean=mean, latents_std=std).save_pretrained(tmp_path / "vae")
    norm = load_vae(tmp_path / "vae").autoencoder.bn
    torch.testing.assert_close(norm.running_mean, torch.tensor(mean))
    torch.testing.assert_close(norm.running_var.sqrt(), torch.tensor(std))


def test_own_form_keeps_everything(tmp_path):
    wan_model().save_pretrained(tmp_path / "vae")
    before = load_vae(tmp_path / "vae").autoencoder
    write(tmp_path / "vae", tmp_path / "folder")
    write(tmp_path / "folder", tmp_path / "one.safetensors")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (config["latents_mean"], config["latents_std"]) == (list(WAN_MEAN), list(WAN_STD))
    for path in ("folder", "one.safetensors"):
        after = load_vae(tmp_path / path).autoencoder
        assert after.config == before.config
        for name, value in before.state_dict().items():
            assert torch.equal(after.state_dict()[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("train_part", ["decoder", "all"])
def test_a_trained_network_goes_back_into_the_video_vae(train_part, image_folder, tmp_path, capsys):
    theirs = wan_model()
    theirs.save_pretrained(tmp_path / "theirs")
    save_file(official_weights(theirs), tmp_path / "official.safetensors")
    given = {**RUN, "init_from": str(tmp_path / "theirs"), "train_part": train_part, "num_epochs": 1}
    given |= {"data_path": str(image_folder), "output_dir": str(tmp_path / "run"), "learning_rate": 1e-3}
    assert train(given) == 0
    ours = load_vae(tmp_path / "run" / "vae").autoencoder
    latents = ours.encode(image()).mode()
    expected = latents, ours.decode(latents).clamp(-1, 1)

    write(tmp_path / "run" / "vae", tmp_path / "folder", into=str(tmp_path / "theirs"))
    after = type(theirs).from_pretrained(tmp_path / "folder").eval()
    for found, value in zip(one_frame(after, image()), expected, strict=True):
        assert_near(found, value)
    weights, before = after.state_dict(), theirs.state_dict()
    for name, value in before.items():  # what acts only in videos
        if "time_conv" in name:
            assert torch.equal(weights[name], value), name
        elif value.dim() == 5:
            assert torch.equal(weights[name][:, :, :-1], value[:, :, :-1]), name
    assert any(not torch.equal(weights[name], value) for name, value in before.items())

    into = tmp_path / "official.safetensors"
    write(tmp_path / "run" / "vae", tmp_path / "back.safetensors", into=str(into))
    official = official_weights(after)
    back = load_file(tmp_path / "back.safetensors")
    assert back.keys() == official.keys()
    assert all(torch.equal(back[name], value) for name, value in official.items())
    printed = capsys.readouterr().out
    command = f"python export_vae.py --vae {tmp_path / 'run' / 'vae'} --into {tmp_path / 'theirs'}"
    assert f"for other programs: {command} --output exported/run\n" in printed
    assert "videos are not" in printed
    assert ("its latents are unchanged" in printed) == (train_part == "decoder")
    statistics = json.loads((tmp_path / "folder" / "config.json").read_text())["latents_std"]
    assert (statistics == list(WAN_STD)) == (train_part == "decoder")
    write(tmp_path / "run" / "vae", tmp_path / "bf16", into=str(tmp_path / "theirs"), dtype="bf16")
    write(tmp_path / "bf16", tmp_path / "again", into=str(tmp_path / "theirs"))
    words = "rounding of the encoder" if train_part == "decoder" else "its latents are new"
    assert capsys.readouterr().out.count(words) == 2
    if train_part == "decoder":
        assert torch.equal(one_frame(after, image())[0], one_frame(theirs, image())[0])


def test_other_networks_are_refused(tmp_path):
    wan_model(num_res_blocks=1).save_pretrained(tmp_path / "theirs")
    wan_model().save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"^--vae is of another architecture: it lacks .*_blocks"):
        write(tmp_path / "theirs", tmp_path / "out", into=str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"^--into .* gives a folder: name one with --output"):
        write(tmp_path / "theirs", tmp_path / "a.safetensors", into=str(tmp_path / "theirs"))
    residual = wan_model(is_residual=True, base_dim=16)
    residual.save_pretrained(tmp_path / "wan22")  # Wan 2.2, which diffusers computes with its config.json
    (tmp_path / "wan22" / WEIGHTS_NAME).rename(tmp_path / "wan22.safetensors")
    with pytest.raises(UserError, match=r"is a video VAE: .* only Wan 2\.1 and Qwen-Image"):
        load_vae(tmp_path / "wan22.safetensors")
