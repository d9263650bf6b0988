"""The .bat files under Wine, if it is installed: they test cmd as Wine implements it, not Windows itself.

A stub replaces Python. It is the starter that pip adds to scripts on Windows; it runs a batch file that
records its arguments and exits with a given code. `where` and `findstr` do not work in Wine 8, so the tests
cannot distinguish the stub of the Microsoft Store from a missing Python.
"""

import io
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.harness.launcher_projects import CHOICES, Project

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("wine") is None, reason="needs Wine")]

# Called with the path of the .exe and Python's arguments.
STUB = r"""@echo off
setlocal DisableDelayedExpansion
>>"%STUB_LOG%" echo %*
if not "%2"=="-c" goto started
if %3=="import sys" exit /b 0
if %3=="import ensurepip, venv" goto venv
exit /b %STUB_TOO_OLD%
:venv
exit /b %STUB_NO_VENV%
:started
if "%5"=="launchers.training" exit /b %STUB_CODE%
if "%STUB_MAKES%"=="0" exit /b %STUB_SETUP_CODE%
mkdir .venv\Scripts
copy %1 .venv\Scripts\python.exe >nul
echo {}>.venv\.setup-stamp.json
exit /b %STUB_SETUP_CODE%
"""
# Windows' launcher `py` with the versions in PY_HAS.
PY_STUB = r"""@echo off
setlocal DisableDelayedExpansion
>>"%STUB_LOG%" echo %*
for %%V in (%PY_HAS%) do if "%2"=="-%%V" goto found
exit /b 103
:found
if "%3"=="-X" exit /b 0
if %4=="import sys" exit /b 0
if %4=="import ensurepip, venv" exit /b 0
exit /b %STUB_TOO_OLD%
"""
STUBS = ("STUB_TOO_OLD", "STUB_NO_VENV", "STUB_CODE", "STUB_SETUP_CODE", "STUB_MAKES")


def starter() -> bytes:
    """pip's 64-bit starter for console programs: it runs the command in the #! line appended to it."""
    from pip._vendor import distlib

    path = Path(distlib.__file__).with_name("t64.exe")
    if not path.exists():  # Debian's pip does not include it
        pytest.skip("this pip has no starter for Windows")
    return path.read_bytes()


def windows_path(path: Path) -> str:
    return "Z:" + str(path).replace("/", "\\")


class WindowsProject:
    """A project in a folder with a space, a quote and an umlaut, and a stub of Python on PATH."""

    def __init__(self, folder: Path, prefix: Path):
        self.folder = Project(folder / "a b'ü").folder
        self.prefix = prefix
        self.programs = folder / "programs"
        self.programs.mkdir()
        self.log = folder / "log.txt"
        # Without `call`: after it Wine 8 only has the exit codes 0 and 1.
        (folder / "caller.bat").write_bytes(b'@"%BATCH_FILE%" %*\r\n')
        self.add_program("python", STUB)
        if not prefix.exists():
            self.wine("cmd", "/c", "exit")

    def add_program(self, name: str, batch_file: str) -> None:
        """A program that runs a batch file with the path of its .exe and its arguments."""
        path = self.programs.parent / f"{name}_stub.bat"
        path.write_bytes(batch_file.replace("\n", "\r\n").encode("ascii"))
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as empty:
            empty.writestr("__main__.py", "")
        command = rf"#!C:\windows\system32\cmd.exe /c {windows_path(path)}"
        program = starter() + command.encode("ascii") + b"\r\n" + archive.getvalue()
        (self.programs / f"{name}.exe").write_bytes(program)

    def wine(self, *command: str, **more: str) -> subprocess.CompletedProcess:
        environ = {key: value for key, value in os.environ.items() if key != "DISPLAY"}
        environ |= {"LC_ALL": "C.UTF-8", "WINEDEBUG": "-all", "WINEDLLOVERRIDES": "mscoree,mshtml="}
        environ |= {"WINEPREFIX": str(self.prefix), "WINEPATH": windows_path(self.programs)}
        environ |= {"STUB_LOG": windows_path(self.log), **more}
        return subprocess.run(
            ["wine", *command],
            cwd="/",
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=120,
        )

    def run(self, name: str, *arguments: str, **more: str) -> tuple[int, str, list[str]]:
        """Run a .bat file; returns exit code, error output and the command lines of all stub calls."""
        self.log.unlink(missing_ok=True)
        done = self.wine(
            "cmd",
            "/c",
            windows_path(self.programs.parent / "caller.bat"),
            *arguments,
            BATCH_FILE=windows_path(self.folder / name),
            **{"VAE_PYTHON": "", **dict.fromkeys(STUBS, "0"), **more},
        )
        calls = self.log.read_bytes().decode("cp1252").splitlines() if self.log.exists() else []
        return done.returncode, done.stderr.decode("utf-8", "replace"), [call.rstrip() for call in calls]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with one Wine prefix for all tests: creating one takes seconds."""
    return tmp_path_factory.mktemp("windows")


@pytest.fixture
def windows(base, request) -> WindowsProject:
    folder = base / request.node.name.split("[")[0][-40:] / str(len(list(base.rglob("caller.bat"))))
    folder.mkdir(parents=True)
    return WindowsProject(folder, base / "wine")


def words(call: str) -> list[str]:
    """The arguments of a command line, split as Windows programs do if no quote is escaped."""
    return [quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|(\S+)', call)][1:]


PROBES = [
    ["-c", "import sys"],
    ["-c", "import sys; sys.exit(not ((3, 10) <= sys.version_info and 2**32 < sys.maxsize))"],
    ["-c", "import ensurepip, venv"],
]
START = ["-X", "utf8", "-m"]


def test_train_passes_its_arguments(windows):
    """The same arguments as in the tests of train_rtx5090.sh, up to the start of Python."""
    rows = {f"ROW_{index}": arguments for index, (arguments, _) in enumerate(CHOICES)}
    lines = [f'@call "%BATCH_FILE%" %{row}%\r\n' for row in rows]
    (windows.programs.parent / "caller.bat").write_bytes("".join(lines).encode("ascii"))
    typed = {row: subprocess.list2cmdline(arguments) for row, arguments in rows.items()}
    code, error, calls = windows.run("train_rtx5090.bat", VAE_PYTHON="python", **typed)
    assert (code, error) == (0, "")
    expected = [[*START, "launchers.training", *arguments] for arguments in rows.values()]
    assert [words(call) for call in calls] == expected


def test_train_creates_a_missing_environment_and_returns_the_exit_code(windows):
    code, error, calls = windows.run("train_rtx5090.bat", "--demo", STUB_MAKES="1", STUB_CODE="75")
    assert (code, error) == (75, "")
    set_up = [*START, "launchers.environment", "--yes"]
    assert [words(call) for call in calls] == [*PROBES, set_up, [*START, "launchers.training", "--demo"]]
    assert "a b'ü\\.venv\\Scripts\\python.exe" in calls[-1]

    # The environment exists. Without arguments the script ends with `pause`, which must keep the exit code.
    code, error, calls = windows.run("train_rtx5090.bat", STUB_CODE="77")
    assert (code, error) == (77, "")
    assert [words(call) for call in calls] == [[*START, "launchers.training"]]


def test_set_up_passes_its_arguments_and_exit_code(windows):
    arguments = ["--torch", "cpu", "--venv", "my ü env", "--yes"]
    code, error, calls = windows.run("setup_windows.bat", *arguments, STUB_SETUP_CODE="3")
    assert (code, error) == (3, "")
    assert [words(call) for call in calls] == [*PROBES, [*START, "launchers.environment", *arguments]]


@pytest.mark.parametrize(
    ("stubs", "message"),
    [
        ({"STUB_TOO_OLD": "1"}, "python is too old or 32-bit"),
        ({"STUB_NO_VENV": "1"}, "python lacks venv or ensurepip"),
        ({}, "Set-up stopped: "),  # no Python: see the top of this file
    ],
)
def test_unsuitable_python_prints_the_reason_and_the_install_command(windows, stubs, message):
    if not stubs:
        (windows.programs / "python.exe").unlink()
    code, error, calls = windows.run("setup_windows.bat", "--yes", **stubs)
    assert code == 1
    assert message in error
    assert "winget install Python.Python.3.12" in error
    assert not any("launchers" in " ".join(words(call)) for call in calls)


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [("3 3.9 3.12 3.14 3.15", "3.14"), ("3 3.10 3.15", "3.10"), ("3 3.15", "3"), ("3.9", None)],
)
def test_py_starts_the_newest_tested_python(windows, versions, chosen):
    """A version that is not tested yet is used if there is no other; python.exe if py finds none."""
    windows.add_program("py", PY_STUB)
    code, error, calls = windows.run("setup_windows.bat", "--yes", PY_HAS=versions)
    assert (code, error) == (0, "")
    started = [f"-{chosen}"] if chosen else []
    assert words(calls[-1]) == [*started, *START, "launchers.environment", "--yes"]
