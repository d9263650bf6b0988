"""A signal that ends the set-up or a launcher also ends pip and everything that pip has started."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launchers import command
from tests.harness.waiting import is_running, wait_until
from vae.system import child_process
from vae.system.files import claim_folder

if sys.platform != "linux":
    pytest.skip("these tests read /proc", allow_module_level=True)

# A Python whose pip starts another process and waits. Other modules run in the real Python.
FAKE_PYTHON = f"""#!/bin/sh
case "$*" in
-c*) exit 0 ;;
*pip*) ;;
*) exec {sys.executable} "$@" ;;
esac
sleep 300 &
touch "$TMPDIR/download"
echo "$$ $! $TMPDIR" > pids.tmp
mv pids.tmp pids
wait
"""


@pytest.fixture
def fake_pip(project) -> Path:
    """The project's environment has a pip that waits; the file with the process ids of pip and its child."""
    python = project.folder / ".venv" / "bin" / "python"
    claim_folder(project.folder / ".venv", "setup", "--venv")
    python.parent.mkdir()
    (project.folder / ".venv" / "pyvenv.cfg").touch()
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return project.folder / "pids"


COMMANDS = {
    "set-up": ("setup.sh", ["--yes", "--torch", "index"], False),
    "launcher without an environment": ("train_rtx5090.sh", ["--max_steps", "1"], False),
    "launcher with changed requirements": ("train_rtx5090.sh", ["--max_steps", "1"], True),
}


@pytest.mark.parametrize(
    ("command", "sent"),
    [*((name, signal.SIGTERM) for name in COMMANDS), ("set-up", signal.SIGHUP), ("set-up", signal.SIGINT)],
)
def test_signal_ends_pip_and_its_children(project, fake_pip, command, sent):
    script, arguments, has_stamp = COMMANDS[command]
    if has_stamp:
        (project.folder / ".venv" / ".setup-stamp.json").write_text("{}")
    process = subprocess.Popen(
        [project.folder / script, *arguments],
        env=project.environ(VAE_PYTHON="", VAE_TORCH_INDEX="http://127.0.0.1:9/whl"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        wait_until(fake_pip.exists, process)
        *numbers, temporary = fake_pip.read_text().split()
        pids = [int(number) for number in numbers]
        try:
            assert all(map(is_running, pids))
            if sent == signal.SIGINT:  # Ctrl-C reaches the whole group
                os.killpg(process.pid, sent)
            else:
                process.send_signal(sent)
            errors = process.communicate(timeout=30)[1]
            wait_until(lambda: not any(map(is_running, pids)), seconds=20)  # the stand-in sleeps for 30 s
        finally:
            for pid in filter(is_running, [process.pid, *pids]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert process.returncode == 128 + sent
    assert errors.strip().splitlines() == ["Set-up stopped; run ./setup.sh again to continue."]
    assert not Path(temporary).exists()


def test_ctrl_c_while_the_set_up_looks_for_a_python(project):
    tested = project.folder / "tested"
    python = project.folder / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\ntrap 'exit 1' INT\ntouch {shlex.quote(str(tested))}\nsleep 30 & wait\n")
    python.chmod(0o755)
    process = subprocess.Popen(
        [project.folder / "setup.sh", "--yes"], env=project.environ(), start_new_session=True
    )
    with process:
        wait_until(tested.exists, process)
        os.killpg(process.pid, signal.SIGINT)
    assert process.returncode == 130
    assert not (project.folder / ".venv").exists()


def test_command_that_ignores_signals_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(child_process, "SECONDS_TO_END", 0.3)
    script = f"trap '' TERM; sleep 300 & echo $$ $! > {tmp_path}/pids; while true; do wait; done"

    def stop_when_started(_number, frame) -> None:
        while frame is not None and frame.f_code is not command.run_command.__code__:
            frame = frame.f_back
        # Before this function has the process, nothing can end it but the end of this one
        if frame is not None and "process" in frame.f_locals and (tmp_path / "pids").exists():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise command.Stopped(signal.SIGTERM)

    old = signal.signal(signal.SIGALRM, stop_when_started)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(command.Stopped):
            command.run_command(["bash", "-c", script])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    wait_until(lambda: not any(map(is_running, pids)), seconds=20)  # the stand-in sleeps for 30 s


def test_command_returns_its_exit_code():
    assert command.run_command([sys.executable, "-c", "raise SystemExit(7)"]) == 7
