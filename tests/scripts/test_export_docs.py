"""Every command of docs/export.md that needs no network runs unchanged."""

import shlex
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderTiny
from safetensors.torch import save_file

import export_vae
import train_vae
from tests.harness.diffusers_models import build
from tests.harness.pages import code_blocks, commands, page_text
from tests.harness.runs import TINY
from tests.harness.vae_families import SMALL, diffusers_model, research_model
from tests.harness.wan_models import official_weights, wan_model
from vae.config.declare import PUBLISHED_SCALING
from vae.interop.vae_files import load_vae
from vae.training.run import train

TEXT = page_text("export.md")
HUB_NAME = "stabilityai/sdxl-vae"
TINY_FLAGS = "--image_size 32 --batch_size 2 --device cpu --num_workers 0 --perceptual_weight 0 --max_steps 1"


@pytest.fixture
def run_folder(image_folder, tmp_path, monkeypatch) -> Path:
    """A working directory with images in data/train and a run in outputs/first."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/train").symlink_to(image_folder, target_is_directory=True)
    Path("data/test").symlink_to(image_folder, target_is_directory=True)
    assert train({**TINY, "data_path": "data/train", "output_dir": "outputs/first"}) == 0
    for fold in (0, 1):
        shutil.copytree("outputs/first/vae", f"outputs/folds/fold_{fold}/vae")
    save_file(official_weights(wan_model()), "qwen_image_vae.safetensors")
    return tmp_path


@pytest.mark.slow
def test_every_command_runs(run_folder):
    diffusers_model("sdxl", (32, 32, 64, 64), 1).save_pretrained(HUB_NAME)  # in the place of the hub's
    AutoencoderTiny().save_pretrained("madebyollin/taesdxl")
    build("AutoencoderDC").save_pretrained("mit-han-lab/dc-ae-f32c32-sana-1.0-diffusers")
    local = [words for words in commands(TEXT) if words[0] != "hf"]
    assert len(local) > 5
    for python, script, *words in local:
        assert python == "python"
        if script == "train_vae.py":
            assert train_vae.main([*words, *shlex.split(TINY_FLAGS)]) == 0, words
        else:
            assert script == "export_vae.py"
            assert export_vae.main(words) == 0, words
        output = words[words.index("--output_dir" if "train" in script else "--output") + 1]
        if "taesd" not in output:
            load_vae(Path(output))  # also accepts the folder of a run
    assert load_vae(Path("exported/for_flux.safetensors")).scaling_factor == PUBLISHED_SCALING["flux"][0]


def test_conversion_of_a_pickle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    theirs = research_model("sd", *SMALL)
    torch.save({"state_dict": theirs.state_dict(), "epoch": 3}, "model.ckpt")
    code, *_others = code_blocks(TEXT, "python")
    exec(compile(code, "docs/export.md", "exec"), {})
    loaded = load_vae(Path("model.safetensors"))
    assert torch.equal(loaded.autoencoder.decoder.conv_in.weight, theirs.decoder.conv_in.weight)
