"""Child processes: exit codes, output, time limits, and no processes left behind."""

import os
import sys

import pytest

from tests.harness.waiting import is_running, wait_until
from vae.system.child_process import ChildProcess


def python(code: str) -> ChildProcess:
    """A child process that runs this code."""
    return ChildProcess([sys.executable, "-S", "-c", code])


def test_output_and_exit_code():
    outcome = python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)").finish(60)
    assert (outcome.code, outcome.out.strip(), outcome.err.strip()) == (3, "out", "err")


def test_output_larger_than_a_pipe_buffer():
    assert len(python("print('x' * 10_000_000)").finish(60).out) > 10_000_000


def test_time_limit_keeps_earlier_output(tmp_path):
    printed = tmp_path / "printed"
    child = python(f"import time; print('begun', flush=True); open({str(printed)!r}, 'w'); time.sleep(600)")
    wait_until(printed.exists)
    outcome = child.finish(0.01)
    assert (outcome.code, outcome.out.strip()) == (None, "begun")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no process groups")
def test_time_limit_kills_grandchildren(tmp_path):
    inner = (
        "import os, time; open('pid', 'w').write(str(os.getpid())); os.rename('pid', 'ready'); time.sleep(60)"
    )
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {inner!r}])"
    child = ChildProcess([sys.executable, "-S", "-c", outer], cwd=str(tmp_path))
    wait_until((tmp_path / "ready").exists)
    child.finish(0.01)
    pid = int((tmp_path / "ready").read_text())
    wait_until(lambda: not is_running(pid))
