"""Every command in docs/evaluate.md and in the help runs, and the table lists every flag."""

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

import evaluate_vae
import export_vae
import train_vae
from tests.harness.pages import commands, page_text
from tests.harness.runs import TINY
from tests.harness.small_vae import SMALL, write_vae
from vae.config.flags import command_words

OUTPUTS = ("report.html", "results.json", "results.csv", "per_image.csv", "samples")
TEXT = page_text("evaluate.md")


# Three levels: with two, the attention of 256 px takes most of the time.
NARROW = replace(SMALL, channels=(8, 8, 8), norm_groups=4)


@pytest.fixture(scope="module")
def workplace(image_folder, tmp_path_factory) -> Path:
    """A folder with the files of the commands: three VAEs, one of them of a run, and images."""
    folder = tmp_path_factory.mktemp("evaluate_docs")
    write_vae(folder / "outputs" / "first" / "vae", shape=NARROW)
    second = folder / "outputs" / "second"
    given = {**TINY, "channels": NARROW.channels, "data_path": str(image_folder), "output_dir": str(second)}
    assert train_vae.main(command_words(given)) == 0
    words = ["--vae", second / "vae", "--output", folder / "other.safetensors"]
    assert export_vae.main([str(word) for word in words]) == 0
    (folder / "data" / "test").mkdir(parents=True)
    for index in (0, 2):
        image = Image.open(image_folder / f"image_{index:02d}.png").resize((264, 256))
        image.save(folder / "data" / "test" / f"{index}.png")
    return folder


@pytest.fixture
def in_workplace(workplace, monkeypatch) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(workplace))  # LPIPS is reported as missing
    monkeypatch.setattr("vae.losses.trunk_weights.URLS", {"vgg": "http://127.0.0.1:9/vgg16-397923af.pth"})


@pytest.mark.slow
def test_every_command_runs(in_workplace):
    lines = [words for words in commands(TEXT) if words[1] != "examples/diffusion_probe.py"]
    assert len(lines) == 4
    for number, (python, script, *words) in enumerate(lines):
        assert (python, script) == ("python", "evaluate_vae.py")
        quick = ["--device", "cpu", "--samples", "1", *["--no-codecs"] * (number > 0)]
        assert evaluate_vae.main([*words, *quick]) == 0, words
        output = Path(words[words.index("--output_dir") + 1])
        assert {path.name for path in output.glob("[!.]*")} == set(OUTPUTS)
