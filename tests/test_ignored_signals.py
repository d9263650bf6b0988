"""The tests of signals also pass if pytest runs in the background of a shell, which ignores SIGINT there."""

import os
import signal
import subprocess
import sys

import pytest

from tests.harness.runs import ROOT

if os.name == "nt":
    pytest.skip("Windows does not pass ignored signals on", allow_module_level=True)

CODE = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from tests.harness.signals import handle_ignored_signals
handle_ignored_signals()
ask = "from signal import *; print(getsignal(SIGINT) is default_int_handler, getsignal(SIGHUP) is SIG_DFL)"
subprocess.run([sys.executable, "-c", ask], check=True)
signal.raise_signal(signal.SIGINT)
signal.raise_signal(signal.SIGHUP)
print("still running")
"""


def test_children_have_default_handlers_and_pytest_still_ignores_the_signals():
    found = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.splitlines() == ["True True", "still running"], found.stderr


def test_this_process_ignores_neither_signal():
    assert signal.SIG_IGN not in (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGHUP))
