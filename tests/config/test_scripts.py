"""What ends a script: one line on stderr and the exit code that says which kind."""

import sys

import pytest

from vae.config.errors import DataError, UsageError
from vae.console import command_line, fetch_command
from vae.script import ROOT, SETUP, _or_activate, exit_code

ELSE = _or_activate(ROOT)  # nothing within the environment of setup


def raises(error: BaseException):
    def main(argv):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("--x is unknown"), 2, "some.py: --x is unknown"),
        (DataError("no images"), 77, "some.py: no images"),
        (OSError(28, "No space left on device"), 1, "some.py: [Errno 28] No space left on device"),
        (
            ModuleNotFoundError("gone", name="torch.nn"),
            1,
            f"some.py: torch is not installed: run {SETUP}{ELSE}",
        ),
        (KeyboardInterrupt(), 130, "stopped: nothing was written"),
    ],
)
def test_an_error_is_one_line_and_its_code(capsys, error, code, line):
    assert exit_code("some.py", raises(error), [], "stopped: nothing was written") == code
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'vae.gone'", name="vae.gone"), ZeroDivisionError()]
)
def test_a_mistake_of_ours_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        exit_code("some.py", raises(error), [])


def test_what_main_returns_is_the_code():
    assert exit_code("some.py", len, ["a", "b", "c"]) == 3


@pytest.mark.parametrize(
    ("windows", "activate", "words"), [(False, "bin/activate", "source "), (True, "Scripts/activate", "")]
)
def test_an_environment_that_is_there_is_named(tmp_path, monkeypatch, windows, activate, words):
    assert _or_activate(tmp_path, windows) == ""
    script = tmp_path / ".venv" / activate
    script.parent.mkdir(parents=True)
    script.touch()
    assert _or_activate(tmp_path, windows) == f", or activate the environment: {words}{script}"
    monkeypatch.chdir(tmp_path)
    relative = script.relative_to(tmp_path)
    assert _or_activate(tmp_path, windows) == f", or activate the environment: {words}{relative}"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert _or_activate(tmp_path, windows) == ""  # it lacks the package itself


@pytest.mark.parametrize(
    ("windows", "line"),
    [(False, "python x.py --output_dir 'my runs/a'"), (True, 'python x.py --output_dir "my runs/a"')],
)
def test_a_command_is_quoted_for_its_shell(windows, line):
    assert command_line("python", "x.py", "--output_dir", "my runs/a", windows=windows) == line


def test_the_line_that_downloads_is_quoted_for_its_shell():
    url = "https://example.org/a.pth"
    assert fetch_command(url, "/my cache/a.pth", windows=False) == (
        f"curl -L --create-dirs -o '/my cache/a.pth' {url}"
    )
    assert fetch_command(url, r"C:\my cache\a.pth", windows=True) == (
        rf'curl.exe -L --create-dirs -o "C:\my cache\a.pth" {url}'
    )
