"""check_compatibility.py without packages, in the complete environment, with odd terminals and paths."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.harness.check_runs import POSIX, SCRIPT, checks_of, run_check
from tests.harness.runs import ROOT, run_script
from tests.harness.waiting import wait_until

# --- without packages -----------------------------------------------------------------------------------


def test_bare_python_prints_a_complete_report_with_the_set_up_first(bare):
    found = run_check(bare)
    lines = found.stdout.decode().splitlines()
    assert found.returncode == 1
    assert found.stderr == b""
    assert lines[0] == "To do first:"
    assert lines[1].strip() == ("setup_windows.bat" if os.name == "nt" else "./setup.sh")
    for group in ("PyTorch", "Card and driver", "Packages", "System", "Disks and files"):
        assert group in lines
    assert "failed" in lines[-1]


def test_help_and_plan_without_packages(bare):
    found = run_check(bare, "--plan", "--help")
    assert found.returncode == 0
    for word in (b"--json", b"--strict"):
        assert word in found.stdout
    found = run_check(bare, "--plan")
    assert (found.returncode, found.stdout, found.stderr.count(b"\n")) == (1, b"", 1)


@pytest.mark.parametrize("words", [["--jsom"], ["--gpu", "RTX 5090"], ["--strict", "--plan"]])
def test_mistakes_print_one_line(bare, words):
    found = run_check(bare, *words)
    assert (found.returncode, found.stdout, found.stderr.count(b"\n")) == (2, b"", 1)
    assert words[0].encode() in found.stderr


@POSIX
def test_torch_that_crashes_the_process(tmp_path, bare):
    for name in ("torch", "torchvision"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "version.py").write_text("__version__ = '2.14.0+cu130'\ncuda = '13.0'\n")
    (tmp_path / "torch/__init__.py").write_text("import os; os.abort()")
    found = run_check(bare, "--json", PYTHONPATH=str(tmp_path), PATH=str(tmp_path))
    assert (found.returncode, found.stderr) == (1, b"")
    check = checks_of(found.stdout)["torch.loads"]
    assert (check["status"], "signal 6" in check["found"]) == ("fail", True)


# --- terminals, pipes, paths ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env", [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "ascii"}]
)
def test_locales_without_the_characters_of_a_path(bare, env, tmp_path):
    folder = tmp_path / "Bilder 画像 'ü'"
    folder.mkdir()
    found = run_check(bare, "--data_path", os.fspath(folder), **env)
    assert (found.returncode, found.stderr) == (1, b"")
    assert b"Bilder" in found.stdout
    assert run_check(bare, "--json", "--data_path", os.fspath(folder), **env).stdout.isascii()


def test_project_path_with_space_quote_and_umlaut(bare, tmp_path):
    project = tmp_path / "a b'ü"
    shutil.copytree(ROOT / "vae", project / "vae", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (*ROOT.glob("requirements*.txt"), SCRIPT):
        shutil.copy(file, project)
    found = run_check(bare, "--json", cwd=tmp_path, script=str(project / "check_compatibility.py"))
    content = json.loads(found.stdout)
    assert content["ok"] is False
    failed = [check for check in content["checks"] if check["status"] == "fail"]
    assert failed[0]["id"] == "torch.loads"
    assert failed[0]["remedy"]
    assert content["environment"]["project"] == str(project)
    assert not (project / "outputs").exists()


# --- the complete environment ---------------------------------------------------------------------------


@pytest.mark.slow
def test_complete_environment():
    found = run_script("check_compatibility.py", "--json", "--strict")
    assert (found.returncode, found.stderr) == (3, "")  # a hidden or missing card is a warning
    assert json.loads(found.stdout)["ok"] is True
    checks = checks_of(found.stdout)
    assert {checks[name]["status"] for name in ("torch.pair", "card.computes")} == {"pass"}


@POSIX
def test_ctrl_c_while_waiting_for_nvidia_smi(bare, tmp_path):
    (tmp_path / "nvidia-smi").write_text(
        f"#!{sys.executable} -S\nimport time\nopen('begun', 'w').close()\ntime.sleep(60)\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    env = {**os.environ, "PATH": str(tmp_path)}
    process = subprocess.Popen(
        [bare, SCRIPT], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_until((tmp_path / "begun").exists, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"stopped\n")
