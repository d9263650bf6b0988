"""train_rtx5090.sh and .bat pass the same arguments to the trainer."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launchers import menu, training
from tests.harness.launcher_projects import CHOICES, RUN
from tests.harness.runs import ROOT
from vae.checks.facts import Card, Smi

if os.name == "nt":
    pytest.skip("these tests run the shell scripts", allow_module_level=True)


def test_arguments_become_those_of_the_trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, expected in CHOICES:
        found = training.trainer_command(arguments, has_training_data=False)
        assert found == ["train_vae.py", *expected], arguments


# --- demo ----------------------------------------------------------------------------------------


def test_demo_draws_images_once_and_uses_the_next_unused_folder(project):
    project.train("--demo")
    drawn, trained = project.calls()
    assert drawn == ["prepare_data.py", "--mode", "demo", "--output_dir", "./data/demo"]
    assert trained[3:5] == ["--output_dir", "./outputs/demo"]

    (project.folder / "outputs/demo/vae").mkdir(parents=True)
    (project.folder / "outputs/demo-2").mkdir()  # empty: unused
    project.train("--demo")
    (trained,) = project.calls()
    assert trained[3:5] == ["--output_dir", "./outputs/demo-2"]

    project.train("--demo", "--resume_from", "latest")
    assert project.calls()[-1][3:5] == ["--output_dir", "./outputs/demo"]


@pytest.mark.parametrize(
    ("image", "folder"), [("data/train/deep/1.jpg", "./data/train"), ("data/demo/mine.jpg", "./data/demo")]
)
def test_demo_trains_on_existing_images(project, image, folder):
    (project.folder / image).parent.mkdir(parents=True)
    (project.folder / image).touch()
    project.train("--demo")
    (trained,) = project.calls()
    assert trained[-2:] == ["--data_path", folder]


def test_failed_drawing_stops_the_demo_and_goes_on_next_time(project):
    assert project.train("--demo", STUB_PREPARE_CODE="9").returncode == 9
    assert [call[0] for call in project.calls()] == ["prepare_data.py"]
    assert project.train("--demo").returncode == 0
    assert [call[0] for call in project.calls()] == ["prepare_data.py", "train_vae.py"]


# --- exit codes, signals, the menu ---------------------------------------------------------------


@pytest.mark.parametrize("code", [75, 76, 77])
def test_exit_code_of_the_trainer_is_returned(project, code):
    """Runs that end with these codes are not started again: one that diverges needs a good checkpoint."""
    assert project.train("--data_path", "d", STUB_CODE=str(code)).returncode == code
    assert len(project.calls()) == 1


@pytest.mark.parametrize(
    ("code", "reason"), [(76, "training has diverged"), (79, "a decoding process has failed")]
)
def test_run_that_may_go_on_is_started_again_twice(project, code, reason):
    if code == 76:
        run = project.folder / "outputs" / "rtx5090_training"
        run.mkdir(parents=True)
        (run / "diverged.json").touch()
    found = project.train("--data_path", "d", "--init_from", "a.safetensors", STUB_CODE=str(code))
    assert found.returncode == code
    first, *again = project.calls()
    assert first[-4:] == ["--data_path", "d", "--init_from", "a.safetensors"]
    resume = ["--output_dir", RUN[1], "--resume_from", "latest"]
    assert again == [[*first, *resume]] * 2
    assert f"{reason}; restart 2 of 2" in found.stdout


@pytest.mark.parametrize(
    ("given", "folder", "begins_stage"),
    [
        (["--resume_from", "old/a.pt", "--new_stage"], "old", True),
        (["--resume_from=a.pt"], ".", True),
        (["--output_dir=lr=1e-4", "--resume_from", "old/a.pt"], "lr=1e-4", True),
        (["--output_dir", "new", "--resume_from", "latest"], "new", False),
        (["--config", "a=b.json", "--seed", "1"], "of a", False),
        (["--config=a=b.json", "--output_dir", "x"], "x", False),
        (["--init_from", "a.pt"], "./outputs", False),
    ],
)
def test_restart_repeats_the_command_and_resumes(given, folder, begins_stage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a=b.json").write_text('{"output_dir": "of a", "init_from": "b.pt", "max_steps": 9}')
    command = ["python", "train_vae.py", *given]
    resume = ["--output_dir", folder, "--resume_from", "latest", *["--new_stage"] * begins_stage]
    assert training.resumed(command) == [*command, *resume]


@pytest.mark.parametrize(
    ("arguments", "sent", "code_of_trainer", "code"),
    [
        (["--profile", "fast"], signal.SIGTERM, "75", 75),
        (["--profile", "fast"], signal.SIGINT, "", -signal.SIGINT),  # the stub does not handle it
        (["--output_dir", "run"], signal.SIGTERM, "76", 76),  # a diverged run is not started again
        (["--demo"], signal.SIGTERM, "", 128 + signal.SIGTERM),  # while images are drawn
    ],
)
def test_a_signal_ends_the_launcher_and_what_it_has_started(project, arguments, sent, code_of_trainer, code):
    (project.folder / "run").mkdir()
    (project.folder / "run" / "diverged.json").touch()
    launcher = subprocess.Popen(
        [project.folder / "train_rtx5090.sh", *arguments],
        env=project.environ(STUB_WAITS="1", STUB_CODE_OF_SIGNAL=code_of_trainer),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with launcher:
        assert launcher.stdout.readline() == b"waiting\n"
        launcher.send_signal(sent)
        assert launcher.wait(timeout=60) == code
        assert (b"Traceback" in launcher.stderr.read()) == (sent == signal.SIGINT)  # of the stub
    assert len(project.calls()) == 1


def ask(monkeypatch, typed: str, *cards: Card) -> list[str] | None:
    """The answer of the menu, on a machine with these cards."""
    lines = iter(typed.split("\n"))
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr(menu, "query_nvidia_smi", lambda: Smi("answered", cards=cards))
    monkeypatch.setattr(menu, "PHOTOGRAPHS", "./no such folder")
    monkeypatch.chdir(ROOT)
    return menu.ask_job(sys.executable)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("1\n\nvae", ["--profile", "ultra", "--data_path", "vae"]),
        (
            "A\n.\\missing.safetensors\n'launchers'\n \"vae\" ",
            ["--profile", "decoder", "--init_from", "launchers", "--data_path", "vae"],
        ),
        (
            "a\nREADME.md\nsd4\nSD3\nvae",
            [
                *("--profile", "decoder", "--init_from", "README.md", "--scaling_factor", "1.5305"),
                *("--shift_factor", "0.0609", "--data_path", "vae"),
            ],
        ),
        ("a\nREADME.md\n\nvae", ["--profile", "decoder", "--init_from", "README.md", "--data_path", "vae"]),
        ("b\n\nvae", ["--profile", "new", "--data_path", "vae"]),
        ("c\n~", ["--profile", "diffusable", "--data_path", os.path.expanduser("~")]),
        ("d", None),
        (
            "5\nvae\n500\n3\nbig\n640\n0\n3",
            ["--profile", "standard", "--data_path", "vae", "--image_size", "640", "--batch_size", "3"],
        ),
        ("", ["--demo"]),
    ],
)
def test_menu(monkeypatch, capsys, typed, expected):
    assert ask(monkeypatch, typed) == expected
    screen = capsys.readouterr().out
    assert "1  ultra" in screen  # printed by the trainer
    assert "10  demo" in screen
    assert "Enter: demo, because no NVIDIA card was found" in screen
    assert '"" does not' not in screen
    if typed.startswith("A"):
        assert '".\\missing.safetensors" does not exist.' in screen
    if typed.startswith("5"):
        for line in ("500 is not a multiple of 8: try 496 or 504", "3 is too small", "--batch_size 0 is too"):
            assert line in screen


def test_enter_selects_the_profile_for_the_smallest_card(monkeypatch, capsys):
    cards = Card("NVIDIA L4", memory_mib=23034), Card("Tesla T4", memory_mib=15360)
    assert ask(monkeypatch, "\nvae", *cards) == ["--profile", "card-16gb", "--data_path", "vae"]
    assert "Enter: card-16gb, because the card is Tesla T4" in capsys.readouterr().out


def test_menu_in_a_terminal(project):
    code, screen = project.type_into("train_rtx5090.sh", "99\nx\n4\nvae\n")
    assert code == 0
    assert "'99' is not one of" in screen
    assert project.calls() == [["train_vae.py", *RUN, "--profile", "fast", "--data_path", "vae"]]


def test_letters_of_the_menu_are_those_of_the_documentation():
    text = (ROOT / "docs/jobs.md").read_text(encoding="utf-8")
    for pattern in (r"^\| \((\w)\)", r"^## \((\w)\)"):
        assert re.findall(pattern, text, re.MULTILINE) == list(menu.JOBS)


def test_end_of_input_in_the_menu_starts_nothing(project):
    """And numbers of the menu that the documentation names stay."""
    assert dict(list(menu.MENU.items())[:3]) == {"1": "ultra", "2": "high", "3": "standard"}
    code, screen = project.type_into("train_rtx5090.sh", "\x04")
    assert code == 130
    assert "Traceback" not in screen
    assert project.calls() == []


# --- the environment -----------------------------------------------------------------------------


def replace_set_up(project, code: str) -> None:
    """Replace the set-up by this code."""
    (project.folder / "launchers/environment.py").write_text(code)


MAKES_ENVIRONMENT = f"""
import json, os, sys
from pathlib import Path
from launchers.stamp import STAMP, wanted
print(*sys.argv[1:])
os.makedirs(".venv/bin", exist_ok=True)
os.path.lexists(".venv/bin/python") or os.symlink({sys.executable!r}, ".venv/bin/python")
Path(".venv", STAMP).write_text(json.dumps({{**wanted(test=False), "folder": os.path.realpath(".venv")}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("changed", [False, True], ids=["missing environment", "changed requirements"])
def test_environment_is_completed_first_and_a_failure_stops(project, changed):
    def spoil() -> None:
        if changed:
            with (project.folder / "requirements.txt").open("a") as requirements:
                requirements.write("new-thing\n")
        elif (project.folder / ".venv").exists():
            (project.folder / ".venv/.setup-stamp.json").unlink()
        project.calls()

    replace_set_up(project, MAKES_ENVIRONMENT)
    if changed:
        project.train("--profile", "fast", VAE_PYTHON="")
    spoil()
    done = project.train("--profile", "fast", VAE_PYTHON="")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "--yes"
    assert ("the requirements have changed" in done.stdout) == changed
    assert project.calls() == [["train_vae.py", *RUN, "--profile", "fast"]]
    assert project.train("--profile", "fast", VAE_PYTHON="").stdout == ""  # complete: no set-up runs

    spoil()
    replace_set_up(project, "import sys; sys.exit(3)")
    assert project.train("--profile", "fast", VAE_PYTHON="").returncode == 3
    assert project.calls() == []


def test_help_starts_nothing(project):
    replace_set_up(project, "raise SystemExit('the set-up ran')")
    done = project.train("--help", VAE_PYTHON="")
    assert done.returncode == 0
    assert not (project.folder / ".venv").exists()
    assert "--demo" in done.stdout
    assert project.calls() == []
