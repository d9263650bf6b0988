"""setup.sh: the choice of the build, messages for missing programs, and repeated runs."""

import contextlib
import http.server
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launchers import environment, virtual_environment
from launchers.stamp import torch_requirements
from launchers.torch_builds import Machine
from tests.harness.launcher_projects import make_pair, make_wheel
from tests.harness.runs import ROOT, closed_pipe
from vae.system.host import usable_cores

NOWHERE = "http://127.0.0.1:9/whl"  # the discard port refuses connections at once


# --- the menu and the flags --------------------------------------------------------------------


def test_a_version_has_an_environment_of_its_own(capsys):
    def venv(*words: str) -> str:
        return environment.parse([*words])[0].venv

    assert venv() == venv("--torch", "cu130") == ".venv"
    assert venv("--torch", "2.10.0", "--test") == ".venv-2.10.0"
    assert venv("--torch", "2.10.0", "--venv", "other") == "other"
    for wrong in ("2.10", "2.10.0+cpu", "v2.10.0"):
        with pytest.raises(SystemExit):
            venv("--torch", wrong)
        assert f"--torch {wrong} is not one of" in capsys.readouterr().err


RTX_5090 = Machine(580, (("NVIDIA GeForce RTX 5090", (12, 0)),))
RTX_4090 = Machine(560, (("NVIDIA GeForce RTX 4090", (8, 9)),))


@pytest.mark.skipif(sys.platform != "linux", reason="Enter selects another build on other systems")
@pytest.mark.parametrize(
    ("answers", "machine", "build"),
    [
        (["4"], RTX_5090, "cu128"),  # as README and docs say
        ([""], RTX_5090, "cu130"),
        (["0", "cu128", " 6 "], RTX_4090, "cu132"),
        (["3", ""], RTX_4090, "cu126"),  # ended: Enter selects the nearest
        (["1", ""], RTX_5090, "cu128"),  # 12.6 has no code for this card
    ],
)
def test_menu_repeats_until_a_valid_answer(monkeypatch, answers, machine, build):
    left = list(answers)
    monkeypatch.setattr("builtins.input", lambda _: left.pop(0))
    assert environment.ask_build(machine) == build
    assert left == []


def test_set_up_in_a_terminal_asks_before_it_creates_anything(project):
    code, screen = project.type_into("setup.sh", "x\n\x04")
    assert code == 130
    assert "4  CUDA 12.8" in screen
    assert "'x' is not one of" in screen
    assert "Traceback" not in screen
    assert not (project.folder / ".venv").exists()


def test_closed_pipe_ends_without_traceback(project):
    for script in ("setup.sh", "train_rtx5090.sh"):
        environ = project.environ(PYTHONUNBUFFERED="")
        with closed_pipe() as pipe:
            words = [project.folder / script, "--help"]
            done = subprocess.run(words, env=environ, stdout=pipe, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (141, b"")


def test_every_locale_works(project):
    words = [project.folder / "setup.sh", "--venv", "launchers", "--torch", "cpu"]
    done = project.run(*words, LC_ALL="de_DE.ISO-8859-1", PYTHONUTF8="0")
    assert done.returncode == 1
    # Earlier lines may be warnings of bash about a locale that is not installed.
    assert "--venv launchers contains files that" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_help_needs_no_package():
    for launcher in ("environment", "training"):
        command = [sys.executable, "-S", "-m", f"launchers.{launcher}", "--help"]  # without site-packages
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (found.returncode, found.stderr) == (0, "")
        assert ("usage: ./" in found.stdout) == (os.name != "nt")


SHELLS = [
    shell for shell in ("sh", "dash", "bash", "zsh", "mksh", "busybox sh") if shutil.which(shell.split()[0])
]


@pytest.mark.parametrize("script", ["setup.sh", "train_rtx5090.sh"])
@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_runs_the_scripts_and_none_is_replaced(project, tmp_path, shell, script):
    """Also through links, and with the variables of another Python; a sourced script prints one line."""
    file = project.folder / script
    (project.folder / "inner link").symlink_to(script)
    (tmp_path / "link").symlink_to(project.folder / "inner link")
    others = {"PYTHONSAFEPATH": "1", "PYTHONHOME": "/nowhere", "CDPATH": "/"}
    for path in (file, tmp_path / "link"):
        done = project.run(*shell.split(), path, "--help", **others, VAE_PYTHON="")
        assert (done.returncode, done.stdout.split()[0]) == (0, "usage:"), done.stderr
    sourced = f'cd {shlex.quote(str(project.folder))}; . ./{script}; echo "$?,$-"'
    done = project.run(*shell.split(), "-c", sourced)
    status, settings = done.stdout.strip().split(",")
    assert status == "1"
    assert "u" not in settings
    assert done.stderr.count("\n") == 1


# --- Python missing, too old, incomplete ---------------------------------------------------------


@pytest.mark.parametrize(
    ("python3", "message"),
    [
        (None, "no Python found"),
        (
            'case "$*" in *version_info*) exit 1;; --version) echo Python 3.8.1;; esac',
            "Python 3.8.1 is too old",
        ),
        ('case "$*" in *ensurepip*) exit 1;; esac', "python3 lacks venv or ensurepip"),
    ],
)
def test_unsuitable_python_prints_the_reason_and_install_commands(project, tmp_path, python3, message):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "dirname").symlink_to(shutil.which("dirname"))
    if python3:
        (programs / "python3").write_text(f"#!/bin/sh\n{python3}\n")
        (programs / "python3").chmod(0o755)
    done = project.run(shutil.which("bash"), project.folder / "setup.sh", "--yes", PATH=str(programs))
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[0]
    for system in ("Debian, Ubuntu, WSL", "Fedora", "macOS"):
        assert system in done.stderr


@pytest.mark.parametrize("arguments", [["--troch", "cpu"], ["--torch", "cu118"]])
def test_wrong_argument_prints_one_line_without_traceback(project, arguments):
    done = project.run(project.folder / "setup.sh", *arguments)
    assert done.returncode != 0
    assert arguments[0] in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (project.folder / ".venv").exists()


# --- Windows: the Visual C++ runtime, Triton ------------------------------------------------------


@pytest.mark.parametrize("has_runtime", [False, True])
def test_a_missing_runtime_is_copied_to_where_torch_finds_it(monkeypatch, tmp_path, has_runtime):
    """The package puts its DLLs into Scripts, which torch does not search."""
    scripts = tmp_path / "Scripts"
    scripts.mkdir()

    def pip(venv, *arguments):
        assert arguments == ("install", "msvc-runtime")
        (scripts / "vcruntime140_threads.dll").write_bytes(b"a DLL")

    monkeypatch.setattr(virtual_environment, "WINDOWS", True)
    monkeypatch.setattr(virtual_environment, "runs", lambda venv, code: has_runtime)
    monkeypatch.setattr(virtual_environment, "pip", pip)
    virtual_environment.install_runtime(tmp_path)
    copied = [path.read_bytes() for path in tmp_path.glob("Library/bin/*")]
    assert copied == ([] if has_runtime else [b"a DLL"])


def test_triton_for_windows_matches_torch(monkeypatch, capsys, tmp_path):
    calls = []
    monkeypatch.setattr(virtual_environment, "pip", lambda venv, *arguments: calls.append(arguments))
    virtual_environment.install_triton_windows(tmp_path, "2.11.0+cu128")
    assert calls == [("install", "triton-windows==3.6.*")]
    virtual_environment.install_triton_windows(tmp_path, "2.15.0+cu130")
    assert len(calls) == 1
    assert "no Triton for Windows for torch 2.15.0+cu130" in capsys.readouterr().out


# --- the life of an environment, with real pip and tiny wheels -----------------------------------


@contextlib.contextmanager
def index_server(folder: Path):
    """Serve a folder with the layout of a package index, on a free port."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(folder))

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/whl"
        server.shutdown()


@pytest.mark.slow
def test_life_of_an_environment(project, tmp_path):
    """Create, keep, repair, change the build and test: the real pip with wheels of a few lines."""
    wheels, index = tmp_path / "wheels", tmp_path / "index/whl/cu128"
    make_pair(wheels, "2.12.0", "0.27.0")
    make_wheel(wheels, "torch", "2.13.0+cpu", "__version__ = '2.13.0+cpu'")  # no torchvision for it
    for name in ("ruff", "mypy", "pytest"):
        make_wheel(wheels, name, "1.0", "")
    make_pair(tmp_path, "2.14.0+cu128", "0.29.0+cu128")
    for name in ("torch", "torchvision"):
        (index / name).mkdir(parents=True)
        for wheel in tmp_path.glob(f"{name}-*.whl"):
            wheel.rename(index / name / wheel.name)
    torch_pair = "".join(f"{requirement}\n" for requirement in torch_requirements())
    (project.folder / "requirements.txt").write_text(torch_pair)
    (project.folder / "requirements-test.txt").write_text("ruff\nmypy\npytest\n")
    venv = project.folder / ".venv"
    stamp = venv / ".setup-stamp.json"

    def setup(*arguments: str, **more: str) -> str:
        offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
        environ = {"VAE_TORCH_INDEX": NOWHERE, **offline, **more}
        done = project.run(project.folder / "setup.sh", *arguments, **environ)
        assert done.returncode == int(more.get("expect", 0)), done.stderr
        return done.stdout

    output = setup("--yes", "--torch", "cpu")
    assert "cannot be reached" in output
    assert json.loads(stamp.read_text())["torch"] == "2.12.0"  # not the newer one without a torchvision

    assert output.splitlines()[-1] == "check_compatibility.py"  # the last step

    # Complete: nothing changes, and pip does not run; it would take most of the time of a set-up.
    before = {path: path.stat().st_mtime_ns for path in venv.rglob("*") if path.suffix != ".pyc"}
    for arguments in (["--yes"], ["--torch", "cpu"]):
        assert setup(*arguments, PIP_FIND_LINKS=NOWHERE).splitlines() == [
            "The environment .venv is complete: torch 2.12.0. --torch NAME changes the build."
        ]
    assert {path: path.stat().st_mtime_ns for path in venv.rglob("*") if path.suffix != ".pyc"} == before

    # Moved: the programs of the environment work again, without an index.
    project.folder = project.folder.rename(tmp_path / "moved ü")
    venv = project.folder / ".venv"
    stamp = venv / ".setup-stamp.json"
    assert "was made in another folder" in setup("--yes", PIP_FIND_LINKS=NOWHERE)
    assert subprocess.run([venv / "bin/pip", "--version"], capture_output=True).returncode == 0
    assert str(venv) in (venv / "bin/activate").read_text(encoding="utf-8")

    # Killed between torch and torchvision: no stamp, half the packages.
    shutil.rmtree(next(venv.glob("lib/python*/site-packages/torchvision")))
    shutil.rmtree(next(venv.glob("lib/python*/site-packages/torchvision-*")))
    stamp.unlink()
    (venv / ".setup-begun.json").write_text('{"build": "cpu"}')
    assert "Creating the environment" not in setup("--yes")
    assert stamp.exists()
    assert not (venv / ".setup-begun.json").exists()

    # Killed while it was created: the rest of it is ours, but no file of the user in it, and no other folder.
    (venv / "notes.txt").write_text("mine")
    shutil.rmtree(next(venv.glob("lib/python*/site-packages/pip")))
    (venv / "pyvenv.cfg").unlink()
    stamp.rename(venv / ".setup-begun.json")
    assert "Creating the environment" in setup("--yes")
    assert (venv / "notes.txt").read_text() == "mine"
    users = project.folder / ".venv-mine"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", users], check=True)
    before = sorted(users.rglob("*"))
    setup("--yes", "--venv", ".venv-mine", expect="1")
    assert sorted(users.rglob("*")) == before

    # Changed requirements are installed by the set-up and by a launcher.
    with (project.folder / "requirements.txt").open("a") as requirements:
        requirements.write("# changed\n")
    output = setup("--yes")
    assert "Installing the other requirements." in output
    assert "Installing torch" not in output
    with (project.folder / "requirements.txt").open("a") as requirements:
        requirements.write("# and again\n")
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    for expected in (True, False):
        done = project.train("--profile", "fast", VAE_PYTHON="", **offline)
        assert done.returncode == 0, done.stderr
        assert ("Installing the other requirements." in done.stdout) == expected
        assert project.calls()[-1][0] == "train_vae.py"

    # A failing check is reported and does not fail the set-up.
    stamp.unlink()
    output = setup("--yes", STUB_CHECK_CODE="1")
    assert "the check failed" in output.splitlines()[-1]

    with index_server(tmp_path / "index") as address:
        online = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": address + "/cu128", "VAE_TORCH_INDEX": address}
        output = setup("--torch", "cu128", **online)
    assert f"from {address}/cu128" in output
    assert json.loads(stamp.read_text())["torch"] == "2.14.0+cu128"

    lines = setup("--test", "-k", "a b").splitlines()
    assert lines.index("ruff check .") < lines.index("mypy")
    assert lines[-1] == f"pytest -n {usable_cores()} -m not gpu -k a b"
    setup("--test", pytest_code="1", expect="1")
    setup("--test", ruff_code="2", expect="2")
    setup("--test", mypy_code="3", expect="3")

    # If torch and torchvision cannot be imported together, the set-up prints one line and writes no stamp.
    next(venv.glob("lib/python*/site-packages/torchvision/__init__.py")).write_text("raise OSError('nms')")
    stamp.rename(venv / ".setup-begun.json")
    done = project.run(project.folder / "setup.sh", "--yes", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "cannot be imported together (OSError: nms)" in done.stderr
    assert not stamp.exists()
