"""The documented training commands run as typed; flags appended to each one reduce its size."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import train_vae
from tests.harness.runs import ROOT, run_script
from vae.config.flags import command_words, parse_flags
from vae.config.options import PROVENANCE, flatten
from vae.config.resolve import resolve
from vae.interop.checkpoint_file import load_checkpoint

# A later flag overrides an earlier one, so these appended flags reduce any command to seconds.
MODEL = "--channels 8 16 16 --layers_per_block 1 --norm_groups 4"
SIZES = "--image_size 32 --batch_size 2"
MACHINE = "--device cpu --num_workers 0 --save_samples_freq 0"
SMALL = f"{MODEL} {SIZES} {MACHINE} --init default --perceptual_weight 0 --no-use_torch_compile --max_steps 1"

FAST = """python train_vae.py --data_path ./data/train --image_size 1024 --batch_size 16 --mixed_precision \\
    --use_torch_compile --use_bf16 --enable_tf32 --channels_last --persistent_workers"""
PRODUCTION = """python train_vae.py --data_path ./data/train --output_dir ./outputs/production_vae \\
    --image_size 1024 --batch_size 16 --num_epochs 100 --learning_rate 1e-4 --z_channels 16 \\
    --kl_weight 1e-6 --perceptual_weight 1.0 --mixed_precision --gradient_clip 1.0 --num_workers 8 \\
    --checkpoint_freq 5 --save_samples_freq 100"""
LARGE = """python train_vae.py --data_path ./data/train --image_size 2560 --batch_size 2 --num_workers 8 \\
    --mixed_precision --accumulation_steps 2"""
STAGES = [
    "python train_vae.py --image_size 512  --batch_size 32 --num_epochs 25",
    "python train_vae.py --image_size 1024 --batch_size 16 --num_epochs 50"
    " --resume_from ./outputs/checkpoint_epoch_25.pt",
    "python train_vae.py --image_size 2048 --batch_size 4  --num_epochs 25"
    " --resume_from ./outputs/checkpoint_epoch_75.pt",
]
SPEED = ["mixed_precision", "use_bf16", "enable_tf32", "channels_last", "persistent_workers"]


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    """An empty working directory with images in ./data/train."""
    folder = tmp_path / "data" / "train"
    folder.mkdir(parents=True)
    random = np.random.default_rng(2)
    for index in range(5):
        coarse = Image.fromarray(random.integers(0, 256, (5, 6, 3), dtype=np.uint8))
        coarse.resize((48, 40), Image.Resampling.BICUBIC).save(folder / f"{index}.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(line: str, appended: str = "") -> list[str]:
    """The flags of a command, with more flags appended."""
    python, script, *flags = shlex.split(line.replace("\\\n", " "))
    assert (python, script) == ("python", "train_vae.py")
    return [*flags, *shlex.split(appended)]


def run_line(line: str, appended: str = SMALL) -> None:
    """Run a command with the appended flags and check that it succeeds."""
    assert train_vae.main(words(line, appended)) == 0


def saved_options(folder: str) -> dict:
    """The options in config.json of the run in `folder`, which must equal those in its checkpoint."""
    checkpoints = list(Path(folder).glob("checkpoint_*.pt"))
    assert checkpoints
    options = json.loads(Path(folder, "config.json").read_text())
    del options[PROVENANCE]
    saved = load_checkpoint(checkpoints[0])["config"]
    assert saved == {**options, "num_epochs": saved["num_epochs"]}
    return options


@pytest.mark.slow
def test_three_stage_commands(workdir):
    """Epochs and file names are exactly as documented: the last command resumes at epoch 75 = 25 + 50."""
    rare = "--perceptual_weight 0 --checkpoint_freq 100 --val_freq 100"
    for line, size, batch in zip(STAGES, (16, 32, 40), (4, 3, 2), strict=True):
        run_line(line, f"{MODEL} --image_size {size} --batch_size {batch} {MACHINE} {rare}")
    assert {path.name for path in Path("outputs").glob("*.pt")} == {
        f"checkpoint_epoch_{epochs}.pt" for epochs in (25, 75, 100)
    }
    content = load_checkpoint(Path("outputs/checkpoint_epoch_100.pt"))
    assert [tuple(stage.values())[:4] for stage in content["stages"]] == [
        (0, 25, 16, 4),
        (25, 50, 32, 3),
        (75, 25, 40, 2),
    ]


@pytest.mark.slow
def test_command_in_a_subprocess(workdir, capsys):
    done = run_script(str(ROOT / "train_vae.py"), *words(FAST, SMALL), cwd=workdir)
    assert done.returncode == 0, done.stderr
    assert "done: " in done.stdout
    assert "next    python train_vae.py --resume_from outputs/checkpoint_" in done.stdout
    options = saved_options("./outputs")
    assert [options[name] for name in SPEED] == [True] * 5
    assert (options["data_path"], options["image_size"]) == (["./data/train"], 32)
    run_line(FAST, SMALL + " --resume_from latest")
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("line", [FAST, PRODUCTION, LARGE, *STAGES])
def test_commands_set_the_options_they_name(line):
    options = flatten(resolve(parse_flags(words(line))))
    typed = words(line)
    for flag, value in zip(typed, [*typed[1:], "--"], strict=True):
        if flag.startswith("--"):
            expected = "True" if value.startswith("--") else value
            found = options[flag[2:]]
            found = found[0] if isinstance(found, list) else found
            assert str(found) == expected or float(found) == float(expected), flag


def next_words(output: str) -> list[str]:
    """The flags of the command that a run prints at its end."""
    (line,) = [line for line in output.splitlines() if line.startswith("next    ")]
    return words(line.removeprefix("next    "))


@pytest.mark.slow
def test_next_command_completes_a_run_stopped_by_max_steps(tiny, tmp_path, capsys):
    folder = tmp_path / "a run"
    assert train_vae.main([*command_words({**tiny, "output_dir": str(folder)}), "--max_steps", "4"]) == 0
    flags = next_words(capsys.readouterr().out)
    assert flags == ["--resume_from", str(folder / "checkpoint_step_4.pt")]
    assert train_vae.main(flags) == 0
    assert (folder / "checkpoint_epoch_2.pt").exists()  # the original number of epochs
    more = next_words(capsys.readouterr().out)
    assert more == ["--resume_from", str(folder / "checkpoint_epoch_2.pt"), "--num_epochs", "10"]
