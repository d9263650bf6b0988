"""The training commands of the guide on the null GPU: their flags as written, with smaller sizes."""

import json
import shlex
from pathlib import Path

import pytest

from launchers.training import trainer_command
from tests.harness.image_kinds import write_noise
from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu

pytestmark = NEEDS_NULL_GPU

PROGRAM = """
import json, os, sys
from train_vae import main
from vae.system.gpus import set_gpu_memory_variables
set_gpu_memory_variables()
os.chdir(sys.argv[1])
for words in json.loads(sys.argv[2]):
    assert main(words) == 0, words
"""
NARROW = "--channels 32 32 --perceptual_net random"  # weights cannot be downloaded
SMALL = f"{NARROW} --image_size 32 --batch_size 2 --max_steps 2"
COMPILED = """
python train_vae.py --data_path ./data/train --image_size 1024 --batch_size 16 --mixed_precision
    --use_torch_compile --use_bf16 --enable_tf32 --channels_last --persistent_workers
"""
PRODUCTION = """
python train_vae.py --data_path ./data/train --output_dir ./outputs/production_vae --image_size 1024
    --batch_size 16 --num_epochs 100 --learning_rate 1e-4 --z_channels 16 --kl_weight 1e-6
    --perceptual_weight 1.0 --mixed_precision --gradient_clip 1.0
    --num_workers 8 --checkpoint_freq 5 --save_samples_freq 100
"""
LARGEST = """
python train_vae.py --data_path ./data/train --image_size 2560 --batch_size 2 --num_workers 8
    --mixed_precision --accumulation_steps 2
"""


PROFILES = ("ultra", "standard")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which the commands find their images."""
    (tmp_path / "data").mkdir()
    write_noise(tmp_path / "data" / "train", 8, 96, 96)
    return tmp_path


def words_of(command: str, smaller: str) -> list[str]:
    """The arguments of a command, followed by the flags that replace its sizes."""
    python, script, *words = shlex.split(command)
    assert (python, script) == ("python", "train_vae.py")
    return [*words, *shlex.split(smaller)]


def train(folder: Path, *commands: list[str], **settings: str) -> str:
    """Run the commands in one process, one after another; returns what they print and log."""
    done = run_on_null_gpu("-c", PROGRAM, str(folder), json.dumps(commands), gib=32, **settings)
    assert done.stdout.count("\ndone: ") == done.stdout.count(", 2 steps, ") == len(commands)
    assert "PyTorch operations replace" not in done.stdout
    return done.stdout + done.stderr


def test_commands_train(folder: Path):
    """As written, and as train_rtx5090.sh starts profiles and the demo, which needs no LPIPS."""
    commands = [words_of(PRODUCTION, SMALL), words_of(LARGEST, SMALL)]
    for name in PROFILES:
        command = trainer_command(["--profile", name], has_training_data=True)
        smaller = f"{SMALL} --output_dir outputs/{name}"
        commands.append(words_of(shlex.join(["python", *command]), smaller))
    demo = ["python", *trainer_command(["--demo"], has_training_data=True)]
    commands.append(words_of(shlex.join(demo), "--image_size 32 --batch_size 2 --max_steps 2"))
    printed = train(folder, *commands)
    device = "(NVIDIA GeForce RTX 5090), fp16 with loss scaling, TF32, channels_last\n"
    assert printed.count(device) >= 2
    assert printed.count("8 workers") >= 2


def test_compiled_command_trains(folder: Path):
    """torch.compile traces our kernels' callers once, and neither our operations nor Triton."""
    printed = train(folder, words_of(COMPILED, SMALL), TORCH_LOGS="graph_breaks,recompiles")
    assert "bf16, TF32, channels_last, compiled" in printed
    broken = printed.count("Graph break in user code at ")
    assert (
        broken == printed.count("wrapped with `torch.compiler.disable`") > 0
    )  # our operations, nothing else
    assert "Recompiling function" not in printed
