"""Programs beside us: their end, their time limit, what they leave behind."""

import os
import sys
import time

import pytest

from vae.checks.children import Child


def python(code: str) -> Child:
    return Child([sys.executable, "-S", "-c", code])


def test_output_and_code():
    outcome = python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)").finish(60)
    assert (outcome.code, outcome.out.strip(), outcome.err.strip()) == (3, "out", "err")


def test_output_larger_than_a_pipe_holds():
    assert len(python("print('x' * 10_000_000)").finish(60).out) > 10_000_000


@pytest.mark.skipif(os.name == "nt", reason="no signals there")
def test_death_by_a_signal():
    assert python("import os; os.abort()").finish(60).code == -6


def test_time_limit_keeps_what_was_written():
    outcome = python("import time; print('begun', flush=True); time.sleep(60)").finish(1.0)
    assert (outcome.code, outcome.out.strip()) == (None, "begun")


@pytest.mark.skipif(os.name == "nt", reason="process groups are POSIX's")
def test_time_limit_ends_what_it_started_too(tmp_path):
    inner = (
        "import os, time; open('pid', 'w').write(str(os.getpid())); os.rename('pid', 'ready'); time.sleep(60)"
    )
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {inner!r}])"
    child = Child([sys.executable, "-S", "-c", outer], cwd=str(tmp_path))
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    child.finish(0.01)
    pid = int((tmp_path / "ready").read_text())
    for _ in range(1000):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().split()[2] == "Z":  # dead; nobody here is its parent
                    return
        except FileNotFoundError:
            return
        time.sleep(0.01)
    pytest.fail("what it started is still running")


def test_a_program_that_is_not_there():
    with pytest.raises(OSError, match="no-such-program"):
        Child(["/no-such-program"])
