"""A mistake is one line that names flag, value and remedy, with its exit code, and leaves nothing behind."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import train_vae
from tests.harness.runs import ROOT, TINY, as_flags, run_script
from vae.interop.checkpoint_file import load_checkpoint, record_path
from vae.script import exit_code

USAGE, DATA, CONFIG = 2, 77, 78


@pytest.fixture
def mistake(tiny, tmp_path, capsys):
    """Run train_vae.py on `tiny` with the given flags behind it and return its only line."""

    def run(code: int, *words: str, **changed) -> str:
        given = {**tiny, "max_steps": 1, **changed}
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        try:
            flags = as_flags({k: v for k, v in given.items() if v is not None})
            found = exit_code("train_vae.py", train_vae.main, [*flags, *words])
        except SystemExit as error:  # argparse's own way out
            found = error.code
        out, err = capsys.readouterr()
        assert out == ""
        assert found == code, err
        assert err.startswith("train_vae.py: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        assert sorted(tmp_path.rglob("*")) == before
        return err.removeprefix("train_vae.py: ").rstrip("\n")

    return run


# ---- the command line ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (
            "--image_siz 3",
            USAGE,
            "unknown flag --image_siz: did you mean --image_size? (--help lists every flag)",
        ),
        ("--batchsize=3", USAGE, "unknown flag --batchsize: did you mean --batch_size?"),
        ("--image", USAGE, "unknown flag --image"),  # no abbreviations: a new flag would change their meaning
        ("photos", USAGE, "photos belongs to no flag: a path with spaces needs quotes"),
        ("--image_size", USAGE, "argument --image_size: expected one argument"),
        ("--image_size abc", USAGE, "--image_size abc is not a whole number"),
        ("--image_size 32.5", USAGE, "--image_size 32.5 is not a whole number"),
        ("--learning_rate fast", USAGE, "--learning_rate fast is not a number"),
        ("--channels 8 x", USAGE, "--channels x is not a whole number"),
        (
            "--lr_schedule cosin",
            USAGE,
            "argument --lr_schedule: invalid choice: 'cosin' (choose from 'cosine'",
        ),
        ("--image_size -8", CONFIG, "--image_size -8 is too small: the least is 11"),
        ("--batch_size 0", CONFIG, "--batch_size 0 is too small: the least is 1"),
        ("--num_epochs -1", CONFIG, "--num_epochs -1 is too small: the least is 1"),
        ("--learning_rate -1", CONFIG, "--learning_rate -1.0 is too small: the least is 0"),
        ("--kl_weight -0.5", CONFIG, "--kl_weight -0.5 is too small: the least is 0"),
        ("--learning_rate inf", CONFIG, "--learning_rate inf is not a finite number: give one such as 0.001"),
        ("--learning_rate 1e400", CONFIG, "--learning_rate inf is not a finite number"),
        ("--gradient_clip nan", CONFIG, "--gradient_clip nan is not a finite number"),
        ("--warmup_epochs -inf", USAGE, "argument --warmup_epochs: expected one argument"),
        ("--val_split 0.95", CONFIG, "--val_split 0.95 is too large: the most is 0.9"),
        ("--keep_checkpoints 1", CONFIG, "--keep_checkpoints 1 is too small: the least is 2"),
        ("--num_workers -1", CONFIG, "--num_workers -1 is too small: the least is 0"),
        ("--num_workers many", CONFIG, "--num_workers many is not a whole number nor auto"),
        ("--micro_batch_size 0", CONFIG, "--micro_batch_size 0 is too small: the least is 1"),
        ("--seed -1", CONFIG, "--seed -1 is too small: the least is 0"),
        ("--seed 18446744073709551616", CONFIG, "--seed 18446744073709551616 is too large: the most is 9223"),
        ("--output_dir=", CONFIG, "--output_dir is given without a value: give one or leave it out"),
        ("--progressive=", CONFIG, "--progressive is given without a value"),
    ],
)
def test_flags(mistake, words, code, line):
    assert mistake(code, *words.split()).startswith(line)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--image_size 33", "--image_size 33 is not a multiple of 2: try 32 or 34"),
        ("--channels 8 16 16 16 --image_size 500", "--image_size 500 is not a multiple of 8: try 496 or 504"),
        ("--channels 6 16", "--channels width 6 is not a multiple of --norm_groups 4"),
        (
            "--reconstruction_weight 0",
            "--reconstruction_weight 0 and --perceptual_weight 0 leave nothing to learn",
        ),
        ("--profile ultr", "--profile ultr is unknown: did you mean ultra? (ultra, high, standard, fast,"),
        ("--background purplish", "--background purplish is not a colour: give a name"),
        ("--device cuda", "--device cuda: PyTorch finds no CUDA device here; use --device cpu or auto"),
        ("--init_from /nothing", "--init_from /nothing: there is no such file or folder"),
        (
            "--adversarial_weight 1 --disc_layers 9",
            "--disc_layers 9 needs crops of at least 1536 px, not 32: lower --disc_layers or raise",
        ),
        (
            "--adversarial_weight 1 --disc_channels 40 --disc_layers 1",
            "--disc_channels 40 gives widths of 80, which 32 groups do not divide: take a multiple of 16",
        ),
        (
            "--perceptual_weight 1 --perceptual_weights /nothing.pth",
            "--perceptual_weights /nothing.pth is not a file: train without LPIPS by --perceptual_weight 0",
        ),
        (
            "--perceptual_weight 1 --perceptual_net random --perceptual_weights /nothing.pth",
            "--perceptual_weights names a file, but --perceptual_net random uses none: drop one",
        ),
    ],
)
def test_values_that_do_not_fit(mistake, words, line):
    if "--device cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert mistake(CONFIG, *words.split()).startswith(line)


@pytest.mark.parametrize(
    ("listed", "line"),
    [
        ("512", "--progressive 512: '512' is not SIZE:EPOCHS:BATCH; an example is 512:25:32,1024:50:16"),
        ("32:1", "--progressive 32:1: '32:1' is not"),
        ("32:0:2", "--progressive 32:0:2: '32:0:2' is not"),
        ("32:1:2,", "--progressive 32:1:2,: '' is not"),
        ("32:1:2;32:1:2", "--progressive 32:1:2;32:1:2: '32:1:2;32:1:2' is not"),
        ("32:-1:2", "--progressive 32:-1:2: '32:-1:2' is not"),
        ("32:1:2,33:1:2", "--image_size 33 is not a multiple of 2: try 32 or 34"),
        ("8:1:2", "--image_size 8 is too small: the least is 11"),
    ],
)
def test_lists_of_stages(mistake, listed, line):
    assert mistake(CONFIG, "--progressive", listed).startswith(line)


def test_every_stage_of_a_list_is_checked_before_the_first_begins(mistake):
    assert mistake(DATA, "--progressive", "32:1:2,16:1:100").startswith("--batch_size 100 (x 1 accumulation")


# ---- the JSON file -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"image_siz": 32}', 'has the unknown key "image_siz": did you mean image_size?'),
        ('{"list_profiles": true}', 'has the unknown key "list_profiles"'),
        ('{"config": "other.json"}', 'names another "config": put all options into one file'),
        ("[1, 2]", 'must hold one object, like {"image_size": 1024}'),
        ("{", "is not valid JSON: Expecting property name"),
        ("", "is not valid JSON: Expecting value"),
        ('{"val_freq": "3"}', '"val_freq" in the JSON file must be a whole number, not "3"'),
        ('{"val_freq": 3.5}', '"val_freq" in the JSON file must be a whole number, not 3.5'),
        ('{"val_freq": true}', '"val_freq" in the JSON file must be a whole number, not true'),
        ('{"val_freq": null}', '"val_freq" in the JSON file must be a whole number, not null'),
        ('{"val_freq": -3}', "--val_freq -3 is too small: the least is 1"),
        ('{"use_bf16": 1}', '"use_bf16" in the JSON file must be true or false, not 1'),
        ('{"learning_rate": "1e-4"}', '"learning_rate" in the JSON file must be a number, not "1e-4"'),
        ('{"learning_rate": NaN}', "--learning_rate nan is not a finite number"),
        ('{"learning_rate": Infinity}', "--learning_rate inf is not a finite number"),
        ('{"channels": 8}', '"channels" in the JSON file must be a list of numbers, not 8'),
        ('{"channels": []}', '"channels" in the JSON file must be a list of numbers, not []'),
        ('{"channels": [8, "x"]}', '"channels" in the JSON file must be a whole number, not "x"'),
        ('{"crop": "centre"}', "--crop centre is unknown: choose one of random, center"),
        ('{"micro_batch_size": 1.5}', '"micro_batch_size" in the JSON file must be a whole number or "auto"'),
        ('{"background": ""}', "--background is given without a value"),
    ],
)
def test_json_files(mistake, tmp_path, text, line):
    path = tmp_path / "my.json"
    path.write_text(text, encoding="utf-8")
    assert line in mistake(CONFIG, "--config", str(path))


def test_json_files_that_cannot_be_read(mistake, tmp_path):
    assert "cannot be read: No such file" in mistake(CONFIG, "--config", str(tmp_path / "nothing.json"))
    assert "cannot be read: Is a directory" in mistake(CONFIG, "--config", str(tmp_path))
    (tmp_path / "image.json").write_bytes(b"\xff\xd8\xff\xe0")
    assert "is not valid JSON" in mistake(CONFIG, "--config", str(tmp_path / "image.json"))


def test_the_mark_that_windows_editors_write_is_no_mistake(mistake, tmp_path):
    path = tmp_path / "my.json"
    path.write_text('{"z_channels": 0}', encoding="utf-8-sig")
    assert mistake(CONFIG, "--config", str(path), z_channels=None).startswith("--z_channels 0 is too small")


# ---- the images --------------------------------------------------------------------------------------


def test_no_folder_of_images(mistake, tmp_path):
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    (tmp_path / "file.png").write_bytes(b"")
    for name, line in (
        ("nothing", "does not exist: give the folder that holds your images"),
        ("file.png", "is not a folder: give the folder that holds your images"),
        (
            "empty",
            "holds no images (jpg jpeg jpe jfif mpo png apng webp bmp tif tiff avif): put some there",
        ),
    ):
        path = tmp_path / name
        assert mistake(DATA, data_path=str(path)).startswith(f"--data_path {path} {line}")
        assert mistake(DATA, val_path=str(path)).startswith(f"--val_path {path} {line}")


def test_only_bad_images(mistake, tmp_path):
    folder = tmp_path / "bad"
    folder.mkdir()
    for index in range(8):
        (folder / f"{index}.png").write_bytes(b"\x89PNG\r\n\x1a\n torn")
    line = mistake(DATA, data_path=str(folder))
    assert line.startswith(f"--data_path {folder}: none of 6 images tried can be used (6 ")
    assert "for example" in line


def test_images_smaller_than_the_crop(mistake):
    assert "add --upscale or use a smaller --image_size" in mistake(DATA, "--image_size", "64")


def test_fewer_images_than_a_batch(mistake):
    line = mistake(DATA, "--batch_size", "13")
    assert line == (
        "--batch_size 13 (x 1 accumulation x 1 processes) is more than the 12 training images: "
        "lower --batch_size or add images"
    )
    assert mistake(DATA, "--accumulation_steps", "4").startswith("--batch_size 4 (x 4 accumulation x 1 ")


# ---- the output folder ---------------------------------------------------------------------------------


def test_output_that_cannot_be(mistake, tmp_path):
    (tmp_path / "file").write_text("mine")
    inner = tmp_path / "file" / "a" / "b"
    assert mistake(CONFIG, output_dir=str(tmp_path / "file")).endswith("file is a file: name a folder")
    assert mistake(CONFIG, output_dir=str(inner)) == (
        f"--output_dir {inner} lies in {tmp_path / 'file'}, which is a file: name a folder"
    )
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="/proc is a place where nobody can write")
def test_output_that_cannot_be_written(mistake):
    line = mistake(CONFIG, output_dir="/proc/a/b")
    assert line.startswith("--output_dir /proc/a/b cannot be written (/proc: ")
    assert line.endswith("mend its permissions or name another folder")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_output_without_permission(mistake, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "cannot be written" in mistake(CONFIG, output_dir=str(tmp_path / "locked" / "run"))


# ---- a run to go on with -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a finished run of one step, with a discriminator."""
    torch.set_num_threads(1)
    images = tmp_path_factory.mktemp("few")
    random = np.random.default_rng(3)
    for index in range(6):
        Image.fromarray(random.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(images / f"{index}.png")
    folder = tmp_path_factory.mktemp("trained") / "run"
    disc = {"adversarial_weight": 0.5, "disc_channels": 8, "disc_layers": 1}
    given = {**TINY, **disc, "data_path": str(images), "output_dir": str(folder), "num_epochs": 1}
    assert train_vae.main(as_flags(given)) == 0
    return folder


@pytest.fixture
def checkpoint(trained, tmp_path) -> Path:
    """A copy of its checkpoint, to be spoilt."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run" / "checkpoint_epoch_1.pt"


def test_an_output_folder_that_holds_another_run(mistake, checkpoint):
    line = mistake(CONFIG)
    assert line.startswith(
        f"--output_dir {checkpoint.parent} holds another run: name a new folder, or go on with it: "
        f"python train_vae.py --output_dir {checkpoint.parent} --resume_from latest"
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--channels 8 32", "--channels 8 32 contradicts the checkpoint of --resume_from, which has 8 16"),
        (
            "--z_channels 8",
            "--z_channels 8 contradicts the checkpoint of --resume_from, which has 4: leave the flag",
        ),
        ("--use_quant_conv", "--use_quant_conv True contradicts the checkpoint"),
        ("--disc_channels 16", "--disc_channels 16 contradicts the checkpoint of --resume_from, which has 8"),
        ("--init_from /nothing", "--init_from and --resume_from are two starts: give one of them"),
        ("--progressive 16:5:2", "--progressive says 16:5:2 where the checkpoint has trained 32:1:4: repeat"),
    ],
)
def test_what_contradicts_the_checkpoint(mistake, checkpoint, words, line):
    assert mistake(CONFIG, "--resume_from", str(checkpoint), *words.split()).startswith(line)


def test_latest_with_another_size(mistake, checkpoint):
    line = mistake(CONFIG, "--resume_from", "latest", "--image_size", "16")
    assert line.startswith("--image_size 16 is not the 32 of the run")
    assert line.endswith("only with --new_stage")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 16
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace(path: Path) -> None:
    record_path(path).unlink()
    path.write_text("not a checkpoint")


def weights_of_others(path: Path) -> None:
    record_path(path).unlink()
    torch.save({"state_dict": {"decoder.weight": torch.ones(2)}}, path)


def plain_list(path: Path) -> None:
    record_path(path).unlink()
    torch.save([1, 2, 3], path)


@pytest.mark.parametrize("record", [True, False], ids=["with_record", "without_record"])
@pytest.mark.parametrize("spoil", [truncate, alter, empty])
def test_a_damaged_checkpoint(mistake, checkpoint, spoil, record):
    spoil(checkpoint)
    if not record:
        record_path(checkpoint).unlink()
    line = mistake(CONFIG, "--resume_from", str(checkpoint))
    assert line.startswith(f"{checkpoint} is ")


@pytest.mark.parametrize("spoil", [replace, weights_of_others, plain_list])
def test_a_file_that_is_no_checkpoint_of_ours(mistake, checkpoint, spoil):
    spoil(checkpoint)
    line = mistake(CONFIG, "--resume_from", str(checkpoint))
    assert str(checkpoint) in line
    assert "checkpoint" in line.replace(str(checkpoint), "")


def test_a_checkpoint_that_is_not_there(mistake, tmp_path):
    path = tmp_path / "checkpoint_epoch_25.pt"
    assert mistake(CONFIG, "--resume_from", str(path)) == f"--resume_from {path}: there is no such file"
    line = mistake(CONFIG, "--resume_from", str(tmp_path))
    assert line.startswith(f"--resume_from {tmp_path} is a folder: name a checkpoint in it")


def test_latest_where_none_is_valid(mistake, checkpoint, capsys):
    truncate(checkpoint)
    words = ["--output_dir", str(checkpoint.parent), "--resume_from", "latest", "--device", "cpu"]
    code = exit_code("train_vae.py", train_vae.main, words)
    out, err = capsys.readouterr()
    assert code == CONFIG
    assert err == (
        f"train_vae.py: --resume_from latest: none of the 1 checkpoints in {checkpoint.parent} is valid\n"
    )
    assert out.startswith("skipped: ")


# ---- in processes of their own -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--imagesize", "3"], USAGE, "unknown flag --imagesize: did you mean --image_size?"),
        (["--data_path", "/nothing"], DATA, "--data_path /nothing does not exist"),
        (["--image_size", "500"], CONFIG, "--image_size 500 is not a multiple of 8: try 496 or 504"),
    ],
)
def test_exit_codes_of_the_script(tmp_path, words, code, line):
    done = run_script(str(ROOT / "train_vae.py"), *words, "--device", "cpu", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"train_vae.py: {line}")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_good_run_is_no_mistake(trained):
    assert load_checkpoint(trained / "checkpoint_epoch_1.pt")["position"]["step"] == 1
    assert json.loads((trained / "config.json").read_text())["disc_channels"] == 8
