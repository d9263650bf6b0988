"""Output that nobody reads any more, as under `| head`: no script complains of it."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

COMMANDS = [
    ["check_compatibility.py", "--help"],
    ["export_vae.py", "--help"],
    ["prepare_data.py", "--mode", "validate", "--help"],
    ["train_vae.py", "--list_profiles"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_pipe_closed_early_ends_a_script_quietly(command):
    # Unbuffered, argparse would swallow the error itself.
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    script = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    script.stdout.close()
    assert script.stderr.read() == b""
    assert script.wait(timeout=60) == 141
