"""setup.sh: which build it takes, what it says when something is missing, and that it can be run again."""

import ast
import contextlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import venv
import zipfile
from pathlib import Path

import pytest

from launchers import environment, virtual_environment
from launchers.torch_builds import ENDED, Machine
from vae.checks.facts import Smi
from vae.host import usable_cores

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "http://127.0.0.1:9/whl"  # the discard port: refused at once


# --- the menu and the flags --------------------------------------------------------------------


def test_menu_is_the_guides_and_every_choice_exists():
    assert list(environment.MENU) == list("12345678")
    titles = [environment.menu_line(number).split("  ")[2] for number in environment.MENU]
    assert titles[:4] == [
        "CUDA 11.8 (ended)",
        "CUDA 12.1 (ended)",
        "CUDA 12.4 (ended)",
        "CUDA 12.8 (RTX 5090; driver 570 or newer)",
    ]
    assert titles[4:] == [
        "CUDA 13.0 (driver 580 or newer)",
        "CUDA 13.2 (driver 580 or newer)",
        "ROCm (AMD, Linux)",
        "CPU",
    ]
    assert set(environment.MENU.values()) - set(ENDED) <= set(environment.CHOICES)


RTX_5090 = Machine(580, (("NVIDIA GeForce RTX 5090", (12, 0)),))
RTX_4090 = Machine(560, (("NVIDIA GeForce RTX 4090", (8, 9)),))


@pytest.mark.skipif(sys.platform != "linux", reason="Enter takes another build elsewhere")
@pytest.mark.parametrize(
    ("answers", "machine", "build"),
    [
        (["4"], RTX_5090, "cu128"),
        ([""], RTX_5090, "cu130"),
        ([""], None, "cpu"),
        (["0", "cu128", " 6 "], RTX_4090, "cu132"),
        (["3", ""], RTX_4090, "cu126"),  # ended: Enter takes the nearest
        (["1", ""], RTX_5090, "cu128"),  # 12.6 has no code for this card
        (["2", "5"], RTX_5090, "cu130"),
    ],
)
def test_menu_asks_until_it_is_answered(monkeypatch, capsys, answers, machine, build):
    left = list(answers)
    monkeypatch.setattr("builtins.input", lambda _: left.pop(0))
    assert environment.ask_build(machine) == build
    assert left == []
    if answers[0] in ("1", "2", "3"):
        assert "builds ended with torch 2." in capsys.readouterr().out


def test_set_up_in_a_terminal_asks_before_it_makes_anything(project):
    code, screen = project.type_into("setup.sh", "x\n\x04")
    assert code == 130
    assert "4  CUDA 12.8" in screen
    assert "'x' is none of" in screen
    assert "Traceback" not in screen
    assert not (project.folder / ".venv").exists()


def test_an_nvidia_smi_that_hangs_is_said_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(environment.nvidia_smi, "ask", lambda seconds: Smi("hanging", "no answer in 15 s"))
    assert environment.read_machine() is None
    assert capsys.readouterr().out.splitlines() == [
        "nvidia-smi gives no answer in 15 s: going on as on a machine without an NVIDIA card."
    ]


def test_output_that_nobody_reads_any_more_ends_without_a_traceback(project):
    for script in ("setup.sh", "train_rtx5090.sh"):
        shell = subprocess.Popen(
            [project.folder / script, "--help"],
            env=project.environ(PYTHONUNBUFFERED=""),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        shell.stdout.close()  # as `| head` does when it has seen enough
        assert shell.stderr.read() == b""
        assert shell.wait(timeout=30) == 141


@pytest.mark.parametrize("locale", ["C", "POSIX", "de_DE.ISO-8859-1"])
def test_any_locale_will_do(project, locale):
    done = project.run(
        project.folder / "setup.sh", "--venv", "launchers", "--torch", "cpu", LC_ALL=locale, PYTHONUTF8="0"
    )
    assert done.returncode == 1
    # Above it bash itself may complain of a locale that is not installed.
    said = "Set-up stopped: --venv launchers is something else already: name a new folder"
    assert done.stderr.splitlines()[-1] == said
    assert "Traceback" not in done.stderr


def test_launchers_need_only_the_standard_library():
    for path in (ROOT / "launchers").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom | ast.Import):
                top = (getattr(node, "module", None) or node.names[0].name).split(".")[0]
                assert top in ("launchers", "vae", *sys.stdlib_module_names), f"{path} imports {top}"


def test_help_needs_no_package(tmp_path):
    venv.create(tmp_path / "bare", with_pip=False)
    for launcher in ("environment", "training"):
        command = [tmp_path / "bare" / "bin" / "python", "-m", f"launchers.{launcher}", "--help"]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (found.returncode, found.stderr) == (0, "")
        assert "usage: ./" in found.stdout


# --- Python missing, too old, incomplete ---------------------------------------------------------


@pytest.mark.parametrize(
    ("python3", "said"),
    [
        (None, "no Python found"),
        (
            'case "$*" in *version_info*) exit 1;; --version) echo Python 3.8.1;; esac',
            "Python 3.8.1 is too old",
        ),
        ('case "$*" in *ensurepip*) exit 1;; esac', "python3 lacks venv or ensurepip"),
    ],
)
def test_python_that_will_not_do_is_named_with_a_line_per_system(project, tmp_path, python3, said):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "dirname").symlink_to(shutil.which("dirname"))
    if python3:
        (programs / "python3").write_text(f"#!/bin/sh\n{python3}\n")
        (programs / "python3").chmod(0o755)
    done = project.run(shutil.which("bash"), project.folder / "setup.sh", "--yes", PATH=str(programs))
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[0]
    for system in ("Debian, Ubuntu, WSL", "Fedora", "macOS"):
        assert system in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--troch", "cpu"], "--troch"),
        (["--torch", "cu118"], "cu118"),
        (["--venv", "launchers"], "--venv launchers"),
    ],
)
def test_a_wrong_argument_is_one_line_without_traceback(project, arguments, named):
    done = project.run(project.folder / "setup.sh", *arguments)
    assert done.returncode != 0
    assert named in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (project.folder / ".venv").exists()


# --- Triton for Windows --------------------------------------------------------------------------


def test_windows_gets_the_triton_that_suits_its_torch(monkeypatch, capsys, tmp_path):
    calls = []
    monkeypatch.setattr(virtual_environment, "pip", lambda venv, *arguments: calls.append(arguments))
    virtual_environment.install_triton_windows(tmp_path, "2.11.0+cu128")
    assert calls == [("install", "triton-windows==3.6.*")]
    virtual_environment.install_triton_windows(tmp_path, "2.15.0+cu130")
    assert len(calls) == 1
    assert "no Triton for Windows that suits torch 2.15.0+cu130" in capsys.readouterr().out


# --- the life of an environment, with real pip and tiny wheels -----------------------------------


def make_wheel(folder: Path, name: str, version: str, code: str, needs: str = "") -> None:
    """A wheel whose package is one line; as a program it says what it was called with."""
    info = f"{name}-{version}.dist-info"
    program = (
        f"import os, sys; print('{name}', *sys.argv[1:]); sys.exit(int(os.environ.get('{name}_code', 0)))"
    )
    files = {
        f"{name}/__init__.py": code,
        f"{name}/__main__.py": program,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def make_pair(folder: Path, torch: str, torchvision: str) -> None:
    make_wheel(folder, "torch", torch, f"__version__ = '{torch}'")
    needs = f"Requires-Dist: torch=={torch}\n"
    make_wheel(folder, "torchvision", torchvision, "import torch", needs)


@contextlib.contextmanager
def index_server(folder: Path):
    """Serves a folder laid out like a package index, on a free port."""

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
    """Made, left alone, repaired, moved to another build, tested: the real pip on wheels of a few lines."""
    wheels, index = tmp_path / "wheels", tmp_path / "index/whl/cu128"
    make_pair(wheels, "2.12.0", "0.27.0")
    make_wheel(wheels, "torch", "2.13.0+cpu", "__version__ = '2.13.0+cpu'")  # no torchvision for it
    make_wheel(wheels, "ruff", "1.0", "")
    make_wheel(wheels, "pytest", "9.0", "")
    make_pair(tmp_path, "2.11.0+cu128", "0.26.0+cu128")
    for name in ("torch", "torchvision"):
        (index / name).mkdir(parents=True)
        for wheel in tmp_path.glob(f"{name}-*.whl"):
            wheel.rename(index / name / wheel.name)
    (project.folder / "requirements.txt").write_text("-r requirements-torch.txt\n")
    (project.folder / "requirements-test.txt").write_text("-r requirements.txt\nruff\npytest\n")
    venv = project.folder / ".venv"
    stamp = venv / ".setup-stamp.json"

    def setup(*arguments: str, **more: str) -> str:
        offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
        environ = {"VAE_TORCH_INDEX": NOWHERE, **offline, **more}
        done = project.run(project.folder / "setup.sh", *arguments, **environ)
        assert done.returncode == int(more.get("expect", 0)), done.stderr
        return done.stdout

    said = setup("--yes", "--torch", "cpu")
    assert "cannot be reached" in said
    assert json.loads(stamp.read_text())["torch"] == "2.12.0"  # not the newer one without a torchvision

    assert said.splitlines()[-1] == "check_compatibility.py --quick"  # what it ends with

    # Complete: nothing is changed, and no pip is started, which takes most of a set-up's seconds.
    before = {path: path.stat().st_mtime_ns for path in venv.rglob("*") if path.suffix != ".pyc"}
    for arguments in (["--yes"], ["--torch", "cpu"]):
        assert setup(*arguments, PIP_FIND_LINKS=NOWHERE).splitlines() == [
            "The environment .venv is complete: torch 2.12.0. --torch NAME changes the build."
        ]
    assert {path: path.stat().st_mtime_ns for path in venv.rglob("*") if path.suffix != ".pyc"} == before

    # Killed between torch and torchvision: no stamp, half the packages.
    shutil.rmtree(next(venv.glob("lib/python*/site-packages/torchvision")))
    shutil.rmtree(next(venv.glob("lib/python*/site-packages/torchvision-*")))
    stamp.unlink()
    (venv / ".setup-begun.json").write_text('{"build": "cpu"}')
    assert "Making the environment" not in setup("--yes")
    assert stamp.exists()
    assert not (venv / ".setup-begun.json").exists()

    # Other requirements are a reason to install again, for the set-up and for a launcher.
    with (project.folder / "requirements.txt").open("a") as requirements:
        requirements.write("# changed\n")
    said = setup("--yes")
    assert "Installing the other requirements." in said
    assert "Installing torch" not in said
    with (project.folder / "requirements.txt").open("a") as requirements:
        requirements.write("# and again\n")
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    for expected in (True, False):
        done = project.train("--profile", "fast", VAE_PYTHON="", **offline)
        assert done.returncode == 0, done.stderr
        assert ("Installing the other requirements." in done.stdout) == expected
        assert project.calls()[-1][0] == "train_vae.py"

    # A check that fails is shown; the environment stands.
    stamp.unlink()
    said = setup("--yes", STUB_CHECK_CODE="1")
    assert "The environment stands" in said.splitlines()[-1]

    with index_server(tmp_path / "index") as address:
        online = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": address + "/cu128", "VAE_TORCH_INDEX": address}
        said = setup("--torch", "cu128", **online)
    assert f"from {address}/cu128" in said
    assert json.loads(stamp.read_text())["torch"] == "2.11.0+cu128"

    said = setup("--test", "-k", "a b")
    assert "ruff check ." in said
    assert f"pytest -n {usable_cores()} -m not gpu -k a b" in said
    assert setup("--test", pytest_code="1", expect="1")
    assert setup("--test", ruff_code="2", expect="2")

    # A pair that does not load together is one line, and no stamp says otherwise.
    next(venv.glob("lib/python*/site-packages/torchvision/__init__.py")).write_text("raise OSError('nms')")
    stamp.rename(venv / ".setup-begun.json")
    done = project.run(project.folder / "setup.sh", "--yes", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "do not load together (OSError: nms)" in done.stderr
    assert not stamp.exists()
