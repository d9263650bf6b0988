"""infer_vae.py as it is typed: its help, its mistakes in one line, and nothing half-written."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

import infer_vae
from tests.harness.runs import ROOT, run_script
from tests.harness.small_vae import write_vae
from tests.test_layers import without_libraries
from vae.script import exit_code


def type_line(capsys, *words) -> tuple[int, str, str]:
    """Exit code, output and errors of the script."""
    code = exit_code("infer_vae.py", infer_vae.main, [str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory) -> Path:
    return write_vae(tmp_path_factory.mktemp("infer") / "vae")


@pytest.fixture
def asked(vae_folder, image_folder, tmp_path) -> dict[str, object]:
    """Flags of a command that works."""
    return {
        "--vae": vae_folder,
        "--mode": "reconstruct",
        "--input": image_folder / "image_00.png",
        "--output_dir": tmp_path / "out",
        "--device": "cpu",
    }


def flat(flags: dict[str, object]) -> list[object]:
    return [word for pair in flags.items() for word in pair]


def test_the_help_answers_without_pytorch():
    found = without_libraries("infer_vae.py", "--help")
    assert found.returncode == 0, found.stderr
    for word in ("--vae", "--tile", "required", "examples:", "77"):
        assert word in found.stdout
    assert max(map(len, found.stdout.splitlines())) <= 110


def test_pytorch_that_is_missing_is_said_in_one_line():
    words = ("--vae", "x", "--mode", "encode", "--input", "y", "--output_dir", "z")
    found = without_libraries("infer_vae.py", *words)
    assert found.returncode == 1
    assert len(found.stderr.splitlines()) == 1
    assert "setup.sh" in found.stderr


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        ({"--mode": "improve"}, 2, "invalid choice: 'improve'"),
        ({"--titel": "512"}, 2, "--tile"),
        ({"--steps": "1", "--mode": "interpolate"}, 78, "--steps 1 is too small: the minimum is 2"),
        ({"--count": "3"}, 78, "--count belongs to --mode variations, not to --mode reconstruct"),
        ({"--tile_size": "256"}, 78, "--tile_size 256 says nothing without --tile"),
        ({"--background": "whitish"}, 78, "--background whitish is not a colour"),
        ({"--vae": "nowhere"}, 78, "--vae nowhere: there is no such file or folder"),
        ({"--input": "nowhere.png"}, 77, "--input nowhere.png does not exist"),
        ({"--output_dir": __file__}, 78, "is a file: give a folder"),
    ],
)
def test_a_mistake_is_one_line(asked, tmp_path, capsys, changed, code, said):
    words = [str(word) for word in flat({**asked, **changed})]
    try:
        found = exit_code("infer_vae.py", infer_vae.main, words)
    except SystemExit as stop:  # argparse's own
        found = stop.code
    errors = capsys.readouterr().err
    assert found == code
    assert said in errors
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_card_that_is_not_there(asked, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    code, _, errors = type_line(capsys, *flat({**asked, "--device": "cuda"}))
    assert code == 78
    assert "--device cuda" in errors


def test_files_that_hold_no_vae_or_a_torn_one(asked, vae_folder, tmp_path, capsys):
    weights = vae_folder / "diffusion_pytorch_model.safetensors"
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(weights.read_bytes()[:-100])
    pickle = tmp_path / "model.ckpt"
    torch.save({"state_dict": {}}, pickle)
    for path, said in ((torn, "truncated"), (pickle, "pickle")):
        code, _, errors = type_line(capsys, *flat({**asked, "--vae": path}))
        assert code == 78
        assert said in errors
        assert len(errors.splitlines()) == 1


@pytest.mark.slow
def test_a_process_of_its_own_with_a_bad_file_exits_77(asked, image_folder, tmp_path):
    folder = tmp_path / "some"
    shutil.copytree(image_folder / "inner", folder)
    (folder / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    found = run_script("infer_vae.py", *map(str, flat({**asked, "--input": folder})))
    assert found.returncode == 77, found.stderr
    assert "8 of 9 done, 1 failed" in found.stdout
    assert found.stderr.startswith("bad.png: ")
    assert "Traceback" not in found.stderr
    assert len(list((tmp_path / "out").iterdir())) == 8


@pytest.mark.slow
def test_stopped_by_sigterm_it_leaves_whole_images_only(asked, image_folder, tmp_path):
    if sys.platform == "win32":
        pytest.skip("no SIGTERM to catch on Windows")
    folder = tmp_path / "many"
    folder.mkdir()
    large = Image.open(image_folder / "image_00.png").resize((240, 200))
    for number in range(200):
        large.save(folder / f"{number}.bmp")
    words = [sys.executable, "infer_vae.py", *map(str, flat({**asked, "--input": folder}))]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, patience = tmp_path / "out", time.monotonic() + 120
    while time.monotonic() < patience and not (out.is_dir() and len(list(out.glob("*.png"))) >= 2):
        time.sleep(0.05)
    process.terminate()
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130, errors
    assert errors.startswith("stopped")
    names = [path.name for path in out.iterdir()]
    assert not [name for name in names if not name.endswith(".png")]  # no temporary file
    assert 2 <= len(names) < 200
    for name in names:
        Image.open(out / name).load()
