"""How a script ends: one line on stderr and an exit code for the kind of error."""

import sys

import pytest

from tests.harness.runs import run_script
from vae.system.console import command_line
from vae.system.errors import DataError, UsageError
from vae.system.script import MISSING_RUNTIME, ROOT, SETUP, activation_hint, exit_code

TOO_LITTLE = f"too little memory (ulimit -v), or a damaged package: run {SETUP}"
NO_DLL = OSError(
    '[WinError 126] Modul nicht gefunden. Error loading "C:\\v\\shm.dll" or one of its dependencies.'
)
FULL_DISK = ": free some space, or give an output folder on another disk"
UNUSABLE = ": TORCHINDUCTOR_CACHE_DIR is cache: set it to a folder that can be written, or unset it"
HINT = activation_hint(ROOT)  # empty if the tests run in the environment of the set-up


def raises(error: BaseException):
    """A main function that raises this error."""

    def main(argv):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("--x is unknown"), 2, "some.py: --x is unknown"),
        (DataError("no images"), 77, "some.py: no images"),
        (OSError("cannot write"), 1, "some.py: cannot write"),
        (OSError(13, "Permission denied", "a/b"), 1, "some.py: a/b: Permission denied"),
        (OSError(17, "File exists", "cache"), 1, f"some.py: cache: File exists{UNUSABLE}"),
        (OSError(2, "No such file", "cache/below/it"), 1, f"some.py: cache/below/it: No such file{UNUSABLE}"),
        (OSError(28, "No space left on device", "a"), 1, f"some.py: a: No space left on device{FULL_DISK}"),
        (OSError(28, "No space left on device"), 1, f"some.py: No space left on device{FULL_DISK}"),
        (
            ModuleNotFoundError("gone", name="torch.nn"),
            1,
            f"some.py: torch is not installed: run {SETUP}{HINT}",
        ),
        (ImportError("failed to map segment"), 1, f"some.py: failed to map segment: {TOO_LITTLE}"),
        (NO_DLL, 1, f"some.py: {MISSING_RUNTIME}"),
        (ImportError("DLL load failed while importing _C: x"), 1, f"some.py: {MISSING_RUNTIME}"),
        (MemoryError(), 1, f"some.py: out of memory: {TOO_LITTLE}"),
        (KeyboardInterrupt(), 130, "stopped: nothing was written"),
    ],
)
def test_error_prints_one_line_and_has_an_exit_code(capsys, monkeypatch, error, code, line):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "cache")
    assert exit_code("some.py", raises(error), [], "stopped: nothing was written") == code
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'vae.gone'", name="vae.gone"), ZeroDivisionError()]
)
def test_our_own_bug_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        exit_code("some.py", raises(error), [])


def test_result_of_main_is_the_exit_code():
    assert exit_code("some.py", len, ["a", "b", "c"]) == 3


ENDS = """
import sys
from vae.system.script import run_script

class Kept:
    def __del__(self):
        print("taken apart")

def main(argv):
    import atexit, threading
    sys.kept = Kept()
    atexit.register(print, "handler")
    threading.Timer(0.1, print, ["thread"]).start()
    print("main")
    return int(argv[0])

run_script("some.py", main)
"""


def test_process_ends_after_threads_and_exit_handlers_with_nothing_taken_apart():
    done = run_script("-c", ENDS, "7")
    assert (done.returncode, done.stdout.split(), done.stderr) == (7, ["main", "thread", "handler"], "")


@pytest.mark.parametrize(
    ("windows", "activate", "words"), [(False, "bin/activate", "source "), (True, "Scripts/activate", "")]
)
def test_activation_hint_for_an_existing_environment(tmp_path, monkeypatch, windows, activate, words):
    assert activation_hint(tmp_path, windows) == ""
    script = tmp_path / ".venv" / activate
    script.parent.mkdir(parents=True)
    script.touch()
    quoted = command_line(script, windows=windows)
    assert activation_hint(tmp_path, windows) == f", or activate the environment: {words}{quoted}"
    monkeypatch.chdir(tmp_path)
    relative = command_line(script.relative_to(tmp_path), windows=windows)
    assert activation_hint(tmp_path, windows) == f", or activate the environment: {words}{relative}"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert activation_hint(tmp_path, windows) == ""  # this environment lacks the package
