"""Every command in docs/infer.md runs."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

import infer_vae
from tests.harness.pages import code_blocks, commands, page_text
from tests.harness.small_vae import write_vae
from vae.config.trained_vae_flags import MODES

TEXT = page_text("infer.md")


@pytest.fixture
def workplace(image_folder, tmp_path, monkeypatch) -> Path:
    """A folder with the files of the commands: a VAE, and images, one of them larger."""
    monkeypatch.chdir(tmp_path)
    write_vae(tmp_path / "outputs" / "first" / "vae")
    shutil.copytree(image_folder / "inner", "data/train")
    shutil.copy(image_folder / "image_00.png", "data/train")
    Image.open(image_folder / "image_00.png").save("photo.jpg", quality=95)
    for number, name in ((0, "first"), (2, "second")):
        shutil.copy(image_folder / f"image_{number:02d}.png", f"{name}.png")
    Image.open(image_folder / "image_02.png").resize((150, 100)).save("huge.png")
    return tmp_path


def test_every_command_runs(workplace):
    lines = commands(TEXT)
    assert {words[words.index("--mode") + 1] for words in lines} == set(MODES)
    for python, script, *words in lines:
        assert (python, script) == ("python", "infer_vae.py")
        assert infer_vae.main(words) == 0, words
        assert any(Path(words[words.index("--output_dir") + 1]).iterdir())
    assert len(list(Path("results/series").glob("*.png"))) == 16
    (code,) = code_blocks(TEXT, "python")
    names: dict = {}
    exec(compile(code, "docs/infer.md", "exec"), names)
    assert names["model_input"].shape == (16, 10, 12)
