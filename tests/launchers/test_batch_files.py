"""The text of the .bat files follows the rules of cmd; these tests need no Windows."""

import re

import pytest

from launchers.stamp import STAMP
from tests.harness.runs import ROOT

PAIRS = [
    ("setup_windows.bat", "setup.sh", "environment"),
    ("train_rtx5090.bat", "train_rtx5090.sh", "training"),
]
BATCH_FILES = [pair[0] for pair in PAIRS]


def lines_of(name: str) -> list[str]:
    """The lines of a batch file without comments."""
    lines = (ROOT / name).read_text(encoding="ascii").splitlines()
    return [line.strip() for line in lines if not line.strip().lower().startswith("rem ")]


def test_every_line_ends_with_crlf():
    """cmd does not find labels in files with bare line feeds."""
    for name in BATCH_FILES:
        assert re.search(rb"(?<!\r)\n", (ROOT / name).read_bytes()) is None
    assert "*.bat text eol=crlf" in (ROOT / ".gitattributes").read_text()


@pytest.mark.parametrize("name", BATCH_FILES)
def test_runs_in_its_own_folder_with_local_variables(name):
    assert lines_of(name)[:3] == [
        "@echo off",
        "setlocal EnableExtensions DisableDelayedExpansion",  # keeps "!" in a path
        'cd /d "%~dp0"',
    ]


@pytest.mark.parametrize("name", BATCH_FILES)
def test_set_commands_are_quoted(name):
    sets = [line for line in lines_of(name) if re.search(r"\bset\b", line)]
    assert sets
    assert all(re.search(r'\bset "\w+=[^"]*"$', line) for line in sets), sets


@pytest.mark.parametrize(("batch", "shell", "body"), PAIRS)
def test_batch_and_shell_script_start_the_same_module(batch, shell, body):
    lines = lines_of(batch)
    (start,) = [i for i, line in enumerate(lines) if f"launchers.{body}" in line]
    assert lines[start].endswith(f" -X utf8 -m launchers.{body} %*")
    end = start + 1 + (lines[start + 1] == ":stop")
    # On its own line: inside parentheses cmd would expand the earlier exit code.
    assert lines[end] == 'set "CODE=%ERRORLEVEL%"'
    assert lines[end + 1 : end + 3] == ['if "%~1"=="" pause', "exit /b %CODE%"]
    assert f'-m launchers.{body} "$@"' in (ROOT / shell).read_text()


def test_both_launchers_run_the_set_up_if_the_stamp_is_missing():
    batch, shell = lines_of("train_rtx5090.bat"), (ROOT / "train_rtx5090.sh").read_text()
    call = batch.index(r"call .\setup_windows.bat --yes")  # without `call`, cmd would not return
    assert batch[call + 1] == 'if not "%ERRORLEVEL%"=="0" goto stop'  # the window of a double click stays
    assert "./setup.sh --yes" in shell
    assert 'wait "$setup" || exit' in shell
    for text in ("\n".join(batch).replace("\\", "/"), shell):
        assert ".venv/.setup-stamp.json" in text
        assert "VAE_PYTHON" in text
    assert STAMP == ".setup-stamp.json"


@pytest.mark.parametrize("name", BATCH_FILES)
def test_no_end_closes_the_window_of_a_double_click(name):
    lines = lines_of(name)
    main = lines[: lines.index(":probe")] if ":probe" in lines else lines
    ends = [i for i, line in enumerate(main) if line.startswith("exit /b")]
    assert ends
    assert all(main[i - 1] == 'if "%~1"=="" pause' for i in ends)


@pytest.mark.parametrize("name", BATCH_FILES)
def test_every_goto_and_call_has_its_label(name):
    lines = lines_of(name)
    labels = {line[1:] for line in lines if line.startswith(":")}
    text = "\n".join(lines)
    wanted = set(re.findall(r"\bgoto (\w+)", text)) | set(re.findall(r"\bcall :(\w+)", text))
    assert wanted == labels


def test_both_set_ups_have_the_same_python_requirements():
    batch, shell = (ROOT / "setup_windows.bat").read_text(), (ROOT / "setup.sh").read_text()
    for asked in ("import ensurepip, venv", "(3, 10)", "2**32"):
        assert asked in batch
        assert asked in shell
    assert "WindowsApps" in batch  # the stub of the Store has its own message


@pytest.mark.parametrize("name", BATCH_FILES)
def test_a_negative_exit_code_is_a_failure(name):
    """`if errorlevel 1` is false for that of a crash or of Ctrl-C; only codes of our own are asked so."""
    lines = lines_of(name)
    asked = [i for i, line in enumerate(lines) if "errorlevel 1" in line]
    assert all(lines[i - 1].startswith("where ") for i in asked)
