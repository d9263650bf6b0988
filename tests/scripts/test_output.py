"""How scripts exit if their output pipe is closed (as with `| head`) or cannot be written."""

import os
import subprocess
import sys

import pytest

from tests.harness.runs import ROOT, closed_pipe
from vae.system.errors import EXIT_DATA


@pytest.mark.parametrize("script", ["check_compatibility.py", "train_vae.py"])  # one is larger than a buffer
def test_closed_pipe_exits_silently_with_141(script):
    command = [sys.executable, script, "--help"]
    with closed_pipe() as pipe:
        done = subprocess.run(command, cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("script", sorted(path.name for path in ROOT.glob("*.py")))
def test_scripts_start_without_their_folder_in_the_path(script):
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, ROOT / script, "--help"], cwd=ROOT, env=environ, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(os.name == "nt", reason="a shell closes the output")
def test_closed_or_full_output_prints_no_traceback():
    for to, code in ((">&-", 0), (">/dev/full", 1)):
        command = f'"$0" train_vae.py --list_profiles {to}'
        found = subprocess.run(["sh", "-c", command, sys.executable], cwd=ROOT, stderr=subprocess.PIPE)
        assert found.returncode == code
        assert found.stderr.count(b"\n") == code


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_error_that_cannot_be_printed_keeps_its_exit_code():
    command = '"$0" train_vae.py --data_path /nonexistent >/dev/full 2>&1'
    assert subprocess.run(["sh", "-c", command, sys.executable], cwd=ROOT).returncode == EXIT_DATA


INTERRUPTED = """
import os, pkgutil, runpy, sys

class Interrupter:
    def find_spec(name, path, target=None):
        if name.startswith("vae.") and name != "vae.commands":
            os.kill(os.getpid(), 2)

sys.meta_path.insert(0, Interrupter)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to one process")
@pytest.mark.parametrize("script", sorted(path.name for path in ROOT.glob("*.py")))
def test_ctrl_c_during_the_first_import_prints_nothing(script):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, script], cwd=ROOT, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (-2, b"")
