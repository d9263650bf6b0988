"""setup.sh: which build it takes, what it says when something is missing, and that it can be run again."""

import contextlib
import http.server
import json
import os
import shutil
import threading
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "http://127.0.0.1:9/whl"  # the discard port: refused at once


# --- which build ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "platform", "build"),
    [
        (595, "linux", "cu130"),
        (580, "win32", "cu130"),
        (579, "linux", "cu128"),
        (570, "linux", "cu128"),
        (560, "linux", "cu126"),
        (470, "linux", "cpu"),
        (None, "linux", "cpu"),
        (None, "darwin", "index"),
    ],
)
def test_auto_takes_the_build_that_the_driver_bears(environment, driver, platform, build):
    assert environment.build_for(driver, platform)[0] == build


def test_menu_is_the_guides_and_every_choice_exists(environment):
    assert list(environment.MENU) == list("12345678")
    assert environment.MENU["4"][:2] == ("CUDA 12.8 (RTX 5090; driver 570 or newer)", "cu128")
    for title, build, remark in environment.MENU.values():
        assert build in environment.CHOICES
        if title in ("CUDA 11.8", "CUDA 12.1", "CUDA 12.4"):  # no torch the project supports has them
            assert "nearest" in remark


@pytest.mark.parametrize(
    ("answers", "driver", "build"),
    [(["4"], 580, "cu128"), ([""], 570, "cu128"), ([""], None, "cpu"), (["0", "cu128", "3"], 560, "cu126")],
)
def test_menu_asks_until_it_is_answered(environment, monkeypatch, answers, driver, build):
    monkeypatch.setattr(environment, "nvidia_driver", lambda: driver)
    monkeypatch.setattr("builtins.input", lambda _: answers.pop(0))
    assert environment.ask_build() == build
    assert answers == []


def test_set_up_in_a_terminal_asks_before_it_makes_anything(project):
    code, screen = project.type_into("setup.sh", "x\n\x04")
    assert code == 1
    assert "4  CUDA 12.8" in screen
    assert "'x' is none of" in screen
    assert "Traceback" not in screen
    assert not (project.folder / ".venv").exists()


@pytest.mark.parametrize(
    ("answer", "driver"),
    [
        ("echo 575.51.03; echo 575.51.03", 575),
        ("echo No devices were found; exit 6", None),
        ("exec sleep 20", None),
    ],
)
def test_driver_is_read_from_nvidia_smi_even_when_it_hangs(
    environment, monkeypatch, tmp_path, answer, driver
):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(environment, "NVIDIA_SMI_TIMEOUT_SECONDS", 0.5)
    assert environment.nvidia_driver() == driver


def test_general_index_stands_in_with_a_version_for_the_same_cuda(environment, monkeypatch, capsys):
    monkeypatch.setenv("VAE_TORCH_INDEX", NOWHERE)
    assert environment.torch_source("cu128")[0] == ["torch<2.11"]
    assert environment.torch_source("cu132")[0] == []
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert all("cannot be reached" in line for line in said)
    with pytest.raises(ValueError, match="--torch rocm"):  # the general index has no such build
        environment.torch_source("rocm")


def test_an_index_that_never_answers_is_given_up_in_seconds(environment, monkeypatch):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("VAE_TORCH_INDEX", f"http://127.0.0.1:{silent.getsockname()[1]}")
        begun = time.monotonic()
        assert environment.read_index("cpu", timeout=0.5) is None
        assert time.monotonic() - begun < 3


def test_newest_rocm_is_read_from_the_index(environment):
    page = "".join(f"<a href='torch-2.10.0%2Brocm{v}-cp312.whl'>" for v in ("6.4", "7.10", "7.2"))
    assert environment.newest_rocm(page) == "rocm7.10"
    assert environment.newest_rocm("<a href='torch-2.10.0%2Bcu128-cp312.whl'>") is None


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

    before = stamp.stat().st_mtime_ns
    begun = time.monotonic()
    assert setup("--yes").count("\n") == 1
    assert setup("--torch", "cpu").count("\n") == 1
    assert time.monotonic() - begun < 4
    assert stamp.stat().st_mtime_ns == before

    # Killed between torch and torchvision: no stamp, half the packages.
    shutil.rmtree(next(venv.glob("lib/python*/site-packages/torchvision")))
    shutil.rmtree(next(venv.glob("lib/python*/site-packages/torchvision-*")))
    stamp.unlink()
    (venv / ".setup-begun.json").write_text('{"build": "cpu"}')
    assert "Making the environment" not in setup("--yes")
    assert stamp.exists()
    assert not (venv / ".setup-begun.json").exists()

    # Other requirements are a reason to install again.
    with (project.folder / "requirements.txt").open("a") as requirements:
        requirements.write("# changed\n")
    said = setup("--yes")
    assert "Installing the other requirements." in said
    assert "Installing torch" not in said

    with index_server(tmp_path / "index") as address:
        online = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": address + "/cu128", "VAE_TORCH_INDEX": address}
        said = setup("--torch", "cu128", **online)
    assert f"from {address}/cu128" in said
    assert json.loads(stamp.read_text())["torch"] == "2.11.0+cu128"

    said = setup("--test", "-k", "a b")
    assert "ruff check ." in said
    assert "pytest -m not gpu -k a b" in said
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
