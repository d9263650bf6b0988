"""The .bat files, held to the rules of cmd by reading them: there is no Windows here to run them on."""

import re
from pathlib import Path

import pytest

from launchers.stamp import STAMP

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [
    ("setup_windows.bat", "setup.sh", "environment"),
    ("train_rtx5090.bat", "train_rtx5090.sh", "training"),
]
BATCH_FILES = [pair[0] for pair in PAIRS]


def lines_of(name: str) -> list[str]:
    """Lines of a batch file without its remarks."""
    lines = (ROOT / name).read_text(encoding="ascii").splitlines()
    return [line.strip() for line in lines if not line.strip().lower().startswith("rem ")]


@pytest.mark.parametrize("name", BATCH_FILES)
def test_every_line_ends_with_crlf(name):
    # cmd loses labels in files with bare line feeds.
    assert re.search(rb"(?<!\r)\n", (ROOT / name).read_bytes()) is None


def test_git_keeps_the_line_ends():
    assert "*.bat text eol=crlf" in (ROOT / ".gitattributes").read_text()


@pytest.mark.parametrize("name", BATCH_FILES)
def test_starts_in_its_own_folder_and_leaves_no_variables_behind(name):
    assert lines_of(name)[:3] == [
        "@echo off",
        "setlocal EnableExtensions DisableDelayedExpansion",  # "!" in a path stays as it is
        'cd /d "%~dp0"',
    ]


@pytest.mark.parametrize("name", BATCH_FILES)
def test_variables_are_set_inside_quotes(name):
    sets = [line for line in lines_of(name) if re.search(r"\bset\b", line)]
    assert sets
    assert all(re.search(r'\bset "\w+=[^"]*"$', line) for line in sets), sets


@pytest.mark.parametrize(("batch", "shell", "body"), PAIRS)
def test_both_files_of_a_pair_hand_all_arguments_to_the_same_body(batch, shell, body):
    lines = lines_of(batch)
    (start,) = [i for i, line in enumerate(lines) if f"launchers.{body}" in line]
    assert lines[start].endswith(f" -X utf8 -m launchers.{body} %*")
    # On a line of its own: within a bracket cmd would fill in the code from before.
    assert lines[start + 1] == 'set "CODE=%ERRORLEVEL%"'
    assert lines[start + 2 : start + 4] == ['if "%~1"=="" pause', "exit /b %CODE%"]
    assert f'-m launchers.{body} "$@"' in (ROOT / shell).read_text()


def test_both_launchers_set_up_a_missing_environment_the_same_way():
    batch, shell = lines_of("train_rtx5090.bat"), (ROOT / "train_rtx5090.sh").read_text()
    call = batch.index("call setup_windows.bat --yes")  # without call, cmd would not come back
    assert batch[call + 1] == "if errorlevel 1 exit /b %ERRORLEVEL%"
    assert "./setup.sh --yes || exit" in shell
    for text in ("\n".join(batch).replace("\\", "/"), shell):
        assert ".venv/.setup-stamp.json" in text
        assert "VAE_PYTHON" in text
    assert STAMP == ".setup-stamp.json"


@pytest.mark.parametrize("name", BATCH_FILES)
def test_every_goto_and_call_has_its_label(name):
    lines = lines_of(name)
    labels = {line[1:] for line in lines if line.startswith(":")}
    text = "\n".join(lines)
    wanted = set(re.findall(r"\bgoto (\w+)", text)) | set(re.findall(r"\bcall :(\w+)", text))
    assert wanted == labels


def test_both_set_ups_ask_python_for_the_same():
    batch, shell = (ROOT / "setup_windows.bat").read_text(), (ROOT / "setup.sh").read_text()
    for asked in ("import ensurepip, venv", "(3, 10)", "2**32"):
        assert asked in batch
        assert asked in shell
    assert "WindowsApps" in batch  # the Store's stub is named as what it is
