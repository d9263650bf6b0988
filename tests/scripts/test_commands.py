"""Every trainer line of the guide runs as it is typed, with sizes lowered by flags typed behind it."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import train_vae
from tests.harness.runs import ROOT, as_flags, run_script
from vae.config.errors import UserError
from vae.config.flags import parse_flags
from vae.config.options import Config, flatten
from vae.config.recipes import RECIPES, recipe_values
from vae.config.resolve import resolve
from vae.interop.checkpoint_file import load_checkpoint
from vae.script import SETUP, _or_activate

# A later flag beats an earlier one, so these make any line a matter of seconds.
MODEL = "--channels 8 16 16 --layers_per_block 1 --norm_groups 4"
SIZES = "--image_size 32 --batch_size 2"
MACHINE = "--device cpu --num_workers 0 --save_samples_freq 0"
LOWERED = f"{MODEL} {SIZES} {MACHINE} --perceptual_weight 0 --no-use_torch_compile --max_steps 1"

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
FROM_JSON = "python train_vae.py --config my.json"
SPEED = ["mixed_precision", "use_bf16", "enable_tf32", "channels_last", "persistent_workers"]


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """An empty folder to type in, with images in ./data/train."""
    folder = tmp_path / "data" / "train"
    folder.mkdir(parents=True)
    random = np.random.default_rng(2)
    for index in range(5):
        coarse = Image.fromarray(random.integers(0, 256, (5, 6, 3), dtype=np.uint8))
        coarse.resize((48, 40), Image.Resampling.BICUBIC).save(folder / f"{index}.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(line: str, appended: str) -> list[str]:
    python, script, *flags = shlex.split(line.replace("\\\n", " "))
    assert (python, script) == ("python", "train_vae.py")
    return [*flags, *shlex.split(appended)]


def type_line(line: str, appended: str = LOWERED) -> None:
    assert train_vae.main(words(line, appended)) == 0


def written(folder: str) -> dict:
    """The options of the run in `folder`, from its checkpoint and from its config.json, which agree."""
    checkpoints = list(Path(folder).glob("checkpoint_*.pt"))
    assert checkpoints
    options = json.loads(Path(folder, "config.json").read_text())
    saved = load_checkpoint(checkpoints[0])["config"]
    assert saved == {**options, "num_epochs": saved["num_epochs"]}
    return options


def test_the_fast_line(workplace):
    type_line(FAST)
    options = written("./outputs")
    assert [options[name] for name in SPEED] == [True] * 5
    assert (options["data_path"], options["image_size"]) == ("./data/train", 32)


@pytest.mark.slow
def test_the_fast_line_compiles(workplace, capfd):
    from vae.training.precision import can_compile

    type_line(FAST, LOWERED.replace("--no-use_torch_compile", "--channels 8 8 --val_split 0"))
    assert written("./outputs")["use_torch_compile"] is True
    reason = can_compile(torch.device("cpu"))
    assert ("training goes on without it" in capfd.readouterr().out) == (reason is not None)


def test_the_production_line(workplace):
    type_line(PRODUCTION, LOWERED.replace("--perceptual_weight 0", "--perceptual_net random"))
    options = written("./outputs/production_vae")
    said = {
        "num_epochs": 100,
        "learning_rate": 1e-4,
        "z_channels": 16,
        "kl_weight": 1e-6,
        "perceptual_weight": 1.0,
        "gradient_clip": 1.0,
        "checkpoint_freq": 5,
        "mixed_precision": True,
    }
    assert {name: options[name] for name in said} == said


def test_the_large_line(workplace):
    type_line(LARGE)
    options = written("./outputs")
    assert (options["accumulation_steps"], options["mixed_precision"]) == (2, True)
    (checkpoint,) = Path("outputs").glob("checkpoint_*.pt")
    assert load_checkpoint(checkpoint)["position"]["images"] == 4


@pytest.mark.slow
def test_the_three_stages(workplace):
    """Epochs and file names exactly as typed: the last resume names epoch 75 = 25 + 50."""
    rare = "--perceptual_weight 0 --checkpoint_freq 100 --val_freq 100"
    for line, size, batch in zip(STAGES, (16, 32, 40), (4, 3, 2), strict=True):
        type_line(line, f"{MODEL} --image_size {size} --batch_size {batch} {MACHINE} {rare}")
    assert {path.name for path in Path("outputs").glob("*.pt")} == {
        f"checkpoint_epoch_{epochs}.pt" for epochs in (25, 75, 100)
    }
    content = load_checkpoint(Path("outputs/checkpoint_epoch_100.pt"))
    assert [tuple(stage.values()) for stage in content["stages"]] == [
        (0, 25, 16, 4),
        (25, 50, 32, 3),
        (75, 25, 40, 2),
    ]


def test_the_line_with_a_json_file(workplace):
    """The file's widths and sizes stand in for the guide's; its number of latent channels is the guide's."""
    given = {
        "channels": [8, 16, 16, 16],
        "z_channels": 32,
        "image_size": 40,
        "batch_size": 3,
        "norm_groups": 4,
    }
    Path("my.json").write_text(json.dumps(given))
    type_line(FROM_JSON, f"{MACHINE} --perceptual_weight 0 --max_steps 1 --image_size 32")
    options = written("./outputs")
    assert {name: options[name] for name in given} == {**given, "image_size": 32}  # the flag beats the file


def test_the_guides_own_json_file_is_read(workplace):
    given = {"channels": [192, 384, 768, 768], "z_channels": 32, "image_size": 1024, "batch_size": 12}
    Path("my.json").write_text(json.dumps(given))
    options = flatten(resolve(parse_flags(words(FROM_JSON, ""))))
    assert {name: options[name] for name in given} == given


@pytest.mark.slow
def test_a_line_in_a_process_of_its_own(workplace):
    done = run_script(str(ROOT / "train_vae.py"), *words(FAST, LOWERED), cwd=workplace)
    assert done.returncode == 0, done.stderr
    assert "done: " in done.stdout
    assert "next    python train_vae.py --resume_from outputs/checkpoint_" in done.stdout
    again = run_script(
        str(ROOT / "train_vae.py"), *words(FAST, LOWERED + " --resume_from latest"), cwd=workplace
    )
    assert (again.returncode, "nothing to do" in again.stdout) == (0, True), again.stderr


@pytest.mark.parametrize("line", [FAST, PRODUCTION, LARGE, *STAGES])
def test_lines_say_what_they_say_unlowered(line):
    options = flatten(resolve(parse_flags(words(line, ""))))
    typed = words(line, "")
    for flag, value in zip(typed, [*typed[1:], "--"], strict=True):
        if flag.startswith("--"):
            expected = "True" if value.startswith("--") else value
            found = options[flag[2:]]
            assert str(found) == expected or float(found) == float(expected), flag


@pytest.mark.slow
def test_the_next_command_said_at_the_end_runs(workplace, capsys):
    type_line(FAST)
    lines = capsys.readouterr().out.splitlines()
    (following,) = [line.removeprefix("next    ") for line in lines if line.startswith("next    ")]
    type_line(following, "--max_steps 2")
    assert Path("outputs/checkpoint_epoch_1.pt").exists() or Path("outputs/checkpoint_step_2.pt").exists()


def next_words(output: str) -> list[str]:
    """The flags of the command said at the end of a run."""
    (line,) = [line for line in output.splitlines() if line.startswith("next    ")]
    return words(line.removeprefix("next    "), "")


@pytest.mark.slow
def test_the_next_command_finishes_what_max_steps_cut_short(tiny, tmp_path, capsys):
    folder = tmp_path / "a run"
    assert train_vae.main([*as_flags({**tiny, "output_dir": str(folder)}), "--max_steps", "4"]) == 0
    flags = next_words(capsys.readouterr().out)
    assert flags == ["--resume_from", str(folder / "checkpoint_step_4.pt")]
    assert train_vae.main(flags) == 0
    assert (folder / "checkpoint_epoch_2.pt").exists()  # the two epochs it was begun with
    more = next_words(capsys.readouterr().out)
    assert more == ["--resume_from", str(folder / "checkpoint_epoch_2.pt"), "--num_epochs", "10"]


def test_latest_without_a_folder_names_the_runs_beside_it(tiny, workplace, capsys):
    options = {**tiny, "output_dir": "outputs/a run", "max_steps": 1}
    assert train_vae.main(as_flags(options)) == 0
    del options["output_dir"]
    with pytest.raises(
        UserError, match=r"outputs holds no checkpoint, but outputs/a run does: .*'outputs/a run'"
    ):
        train_vae.main([*as_flags(options), "--resume_from", "latest"])
    assert [path.name for path in Path("outputs").iterdir()] == ["a run"]
    capsys.readouterr()
    assert train_vae.main([*as_flags(options), "--output_dir", "outputs", "--resume_from", "latest"]) == 0
    said = "outputs holds no checkpoint yet, so a new run begins (there are checkpoints in outputs/a run)"
    assert said in capsys.readouterr().out


# ---- what beats what -----------------------------------------------------------------------------------


def test_flag_beats_json_beats_checkpoint_beats_profile_beats_card_beats_default():
    card, profile = {"prefetch_factor": 8, "image_size": 1}, {"image_size": 768, "batch_size": 24}
    checkpoint = {**flatten(Config()), "image_size": 640}
    assert resolve({}).data.image_size == 512
    assert resolve({}, None, None, {"image_size": 256}).data.image_size == 256
    assert resolve({}, None, profile, card).data.image_size == 768
    assert resolve({}, checkpoint, profile, card).data.image_size == 640
    assert resolve({"image_size": 320}, checkpoint, profile, card).data.image_size == 320
    assert resolve({}, None, profile, card).data.prefetch_factor == 8
    assert resolve({}, checkpoint, profile, card).run.batch_size == 4  # the checkpoint's, though a default


def test_flag_beats_json(tmp_path):
    path = tmp_path / "my.json"
    path.write_text('{"batch_size": 12, "learning_rate": 3, "channels_last": false}')
    given = parse_flags(["--batch_size", "5", "--config", str(path), "--no-enable_tf32"])
    assert (given["batch_size"], given["learning_rate"], given["channels_last"]) == (5, 3.0, False)
    assert given["enable_tf32"] is False
    assert "image_size" not in given


@pytest.mark.slow
def test_a_checkpoint_beats_the_profile_in_a_real_run(workplace):
    type_line(FAST)
    (checkpoint,) = Path("outputs").glob("checkpoint_*.pt")
    assert train_vae.main(["--resume_from", str(checkpoint), "--profile", "ultra", "--max_steps", "2"]) == 0
    options = json.loads(Path("outputs/config.json").read_text())
    assert (options["image_size"], options["batch_size"], options["channels"]) == (32, 2, [8, 16, 16])


def test_a_profile_reaches_the_run(workplace):
    type_line("python train_vae.py --profile maximum")
    options = written("./outputs")
    assert (options["accumulation_steps"], options["use_bf16"]) == (2, True)


def test_profiles_are_the_guides():
    sizes = {"ultra": (2048, 4), "high": (1536, 8), "standard": (1024, 16), "fast": (768, 24)}
    sizes |= {"small": (512, 32), "maximum": (2560, 2)}
    for name, (size, batch) in sizes.items():
        values = recipe_values(name, has_gpu=True)
        assert (values["image_size"], values["batch_size"]) == (size, batch)
        assert values["use_bf16"]
        assert values["use_torch_compile"]
        resolve(dict(values))
    assert RECIPES["maximum"].values["accumulation_steps"] == 2


def test_defaults_are_the_guides():
    defaults = {
        **{"data_path": "./data/train", "output_dir": "./outputs", "image_size": 512, "batch_size": 4},
        **{"num_epochs": 100, "accumulation_steps": 1, "learning_rate": 1e-4, "weight_decay": 1e-5},
        **{"warmup_epochs": 5, "gradient_clip": 1.0, "z_channels": 16, "channels": [128, 256, 512, 512]},
        **{"reconstruction_weight": 1.0, "perceptual_weight": 1.0, "kl_weight": 1e-6},
        **{"mixed_precision": False, "use_bf16": False, "max_steps": None, "val_path": None},
        **{"keep_checkpoints": 3, "early_stopping": 0, "perceptual_net": "vgg", "perceptual_weights": None},
        **{"prefetch_factor": 4, "enable_tf32": True, "channels_last": True, "persistent_workers": True},
        **{"use_torch_compile": False, "num_workers": "auto", "checkpoint_freq": 1, "save_samples_freq": 100},
        **{"val_split": 0.1, "val_freq": 1, "adversarial_weight": 0.0},
    }
    options = flatten(Config())
    assert {name: options[name] for name in defaults} == defaults


def test_every_switch_has_its_no_form():
    switches = [name for name, value in flatten(Config()).items() if isinstance(value, bool)]
    for name in switches:
        assert parse_flags([f"--no-{name}"]) == {name: False}
        assert parse_flags([f"--{name}"]) == {name: True}


def test_help_and_profiles_need_no_pytorch():
    blocked = "import sys; sys.modules['torch'] = None; import train_vae; "
    for flags in (["--list_profiles"], ["--help"]):
        done = run_script("-c", f"{blocked}sys.exit(train_vae.main({flags}))")
        assert done.returncode == 0, done.stderr
        assert "maximum" in done.stdout or "--image_size" in done.stdout
    done = run_script("-c", f"{blocked}train_vae.run_script('train_vae.py', train_vae.main)")
    assert done.returncode == 1
    assert done.stderr == f"train_vae.py: torch is not installed: run {SETUP}{_or_activate(ROOT)}\n"
