"""What only Windows itself can show: files in use, access rights, long paths, Ctrl-C and Ctrl-Break."""

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

if os.name != "nt" or hasattr(ctypes.windll.ntdll, "wine_get_version"):
    pytest.skip("needs Windows itself", allow_module_level=True)

import winreg

from tests.harness.checkpoints import checkpoint
from tests.harness.runs import ROOT
from tests.harness.training_runs import last_checkpoint
from vae.config.flags import command_words
from vae.interop.checkpoint_file import save_checkpoint
from vae.system.errors import EXIT_SAVED_RESUMABLE
from vae.system.files import replace_bytes, why_not_writable
from vae.training.run import train

# In a console of its own: starts a command, and sends an event to both after the command's first records.
SENDER = """\
import os, signal, subprocess, sys, time
from pathlib import Path
for name in ("SIGINT", "SIGBREAK"):
    signal.signal(getattr(signal, name), lambda *_: None)
event, records, *command = sys.argv[1:]
process, records = subprocess.Popen([sys.executable, *command]), Path(records)
while process.poll() is None and not (records.exists() and records.read_bytes().count(b"\\n") > 3):
    time.sleep(0.1)
os.kill(0, getattr(signal, event))
sys.exit(process.wait())
"""


@pytest.mark.parametrize("replace", [replace_bytes, lambda path, _: save_checkpoint(path, checkpoint())])
def test_a_mapped_file_is_waited_for(tmp_path, replace):
    path = tmp_path / "checkpoint_epoch_1.pt"
    path.write_bytes(b"old")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with pytest.raises(PermissionError, match="close the programs that use it"):
        replace(path, b"new")
    assert path.read_bytes() == b"old"
    threading.Timer(1.0, mapped.close).start()
    replace(path, b"new")
    assert path.read_bytes() != b"old"


def test_folder_without_the_right_to_write_is_named(tmp_path):
    user = f"{os.environ['USERDOMAIN']}\\{os.environ['USERNAME']}"
    subprocess.run(["icacls", str(tmp_path), "/deny", f"{user}:(OI)(CI)(W)"], check=True)
    try:
        started = time.monotonic()
        assert "change its permissions" in why_not_writable(tmp_path)
        assert time.monotonic() - started < 10
    finally:
        subprocess.run(["icacls", str(tmp_path), "/remove:d", user], check=True)
    assert why_not_writable(tmp_path) is None


def test_paths_of_300_characters(tmp_path):
    key = winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"SYSTEM\CurrentControlSet\Control\FileSystem")
    if winreg.QueryValueEx(key, "LongPathsEnabled")[0] != 1:
        pytest.skip("long paths are switched off")
    path = Path(tmp_path, *6 * ["ä" * 50], "file.txt")
    replace_bytes(path, b"text")
    assert path.read_bytes() == b"text"


@pytest.mark.parametrize("event", ["CTRL_C_EVENT", "CTRL_BREAK_EVENT"])
def test_ctrl_c_and_ctrl_break_save_and_the_run_can_be_resumed(tiny, tmp_path, event):
    given = {**tiny, "num_epochs": 200, "log_freq": 1, "num_workers": "1"}
    records = tmp_path / "run" / "metrics.jsonl"
    words = [event, str(records), "train_vae.py", *command_words(given)]
    console = {"creationflags": subprocess.CREATE_NEW_CONSOLE, "cwd": ROOT, "timeout": 300}
    assert (
        subprocess.run([sys.executable, "-c", SENDER, *words], **console).returncode == EXIT_SAVED_RESUMABLE
    )
    step = last_checkpoint(tmp_path / "run")["position"]["step"]
    assert train({**given, "num_workers": "0", "resume_from": "latest", "max_steps": step + 1}) == 0
    assert last_checkpoint(tmp_path / "run")["position"]["step"] == step + 1
