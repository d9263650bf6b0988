"""Console output: who prints, closed pipes, escaped text, and shell commands."""

import errno
import io
import logging
import os
import subprocess
import sys

import pytest

from tests.harness.runs import ROOT, closed_pipe
from vae.progress import Progress
from vae.system import console
from vae.system.console import command_line, fetch_command
from vae.system.errors import UserError


@pytest.fixture(autouse=True)
def _default_settings():
    yield
    console.configure()


def test_control_characters_are_printed_escaped(capsys):
    for write in (console.info, console.warning, console.error, console.progress):
        write("\x1b[2Ja\x07\u202e")
    assert "".join(capsys.readouterr()).replace("WARNING: ", "") == "\\x1b[2Ja\\x07\\u202e\n" * 4
    assert str(UserError("\x1b[2J\na")) == "\\x1b[2J\\na"


def test_other_processes_print_only_errors(capsys):
    console.configure(is_main_process=False)
    console.warning("a problem")
    console.error("a mistake")
    assert capsys.readouterr() == ("", "a mistake\n")


@pytest.fixture
def user_logger():
    logger = logging.getLogger("vae")
    yield logger
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)


def test_a_user_may_redirect_or_silence_every_line(capsys, user_logger):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage(), record.filename))
    user_logger.addHandler(handler)
    for write in (console.info, console.warning, console.progress, console.error):
        write("50 % of s3://me:secret@x")
    assert [line[0] for line in lines] == ["INFO", "WARNING", "INFO", "ERROR"]
    assert {line[1:] for line in lines} == {("50 % of s3://x", "test_console.py")}
    assert capsys.readouterr() == ("", "")
    user_logger.handlers.clear()
    user_logger.setLevel(logging.ERROR)
    console.info("a line")
    console.progress("a line")
    assert not console.shows_progress()
    assert capsys.readouterr() == ("", "")


LONG_WORK = """
import sys
from vae.progress import Progress
from vae.system import console
with console.flushed_output(), Progress("work", 3, "step") as progress:
    console.info("ready")
    sys.stdin.readline()
    for _ in range(3):
        progress.update()
        console.info("a line")
        console.error("an error")
print("done", file=open(sys.argv[1], "w"))
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows ends the processes of a closed console")
def test_work_goes_on_after_its_terminal_was_closed(tmp_path):
    """If its signal is ignored, as after `disown`: a process without a controlling terminal gets none."""
    import pty

    ours, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", LONG_WORK, str(tmp_path / "end")],
        stdin=subprocess.PIPE, stdout=terminal, stderr=terminal, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    screen = b""
    while b"ready" not in screen:
        screen += os.read(ours, 4096)
    os.close(ours)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 0
    assert (tmp_path / "end").read_text() == "done\n"


class _OnlyWrite:
    """A stream of an editor or a Tee: no flush, fileno, encoding, isatty or reconfigure."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


def test_streams_of_notebooks_and_editors(monkeypatch):
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    for stream in (_OnlyWrite(), io.StringIO(), None, ascii_only):
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, stream)
        console.info("Bild ü")
        with console.flushed_output(), Progress("work", 2, "step") as progress:
            progress.update(2)
        assert progress.bar is None
        console.discard(stream)
        console.error("end")
        if isinstance(stream, _OnlyWrite):
            assert stream.text.startswith("Bild ü\nwork: 2 of 2 steps")
    assert ascii_only.buffer.getvalue().startswith(b"Bild \\xfc")


RUN_IN_A_KERNEL = """\
import io, runpy, signal, sys, types
class Stream:
    def write(self, text): print(text, end="", file=sys.__stderr__)
signals = lambda: [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
before = signals()
sys.modules["IPython"] = types.ModuleType("IPython")
sys.argv = ["prepare_data.py", "--help"]
sys.stdout = sys.stderr = eval(sys.stdin.read())
try: runpy.run_path("prepare_data.py", run_name="__main__")
except SystemExit as end: code = end.code
sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
print(code, before == signals())
"""


@pytest.mark.parametrize("stream", ["None", "io.StringIO()", "Stream()"])
def test_script_that_ipython_runs_changes_no_signal(stream):
    words = [sys.executable, "-c", RUN_IN_A_KERNEL]
    done = subprocess.run(words, cwd=ROOT, input=stream, capture_output=True, text=True)
    assert done.stdout == "0 True\n", done.stderr
    assert ("usage: prepare_data.py" in done.stderr) == (stream == "Stream()")


def output_with_closed_pipe(code: str) -> tuple[int, str]:
    """Exit code and stderr of a process that runs this code while nothing reads its stdout."""
    words = [sys.executable, "-c", f"from vae.system import console\n{code}"]
    with closed_pipe() as pipe:
        done = subprocess.run(words, cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


def test_closed_pipe_ends_the_process_silently():
    code = "with console.flushed_output():\n  for _ in range(9): console.info('line')"
    assert output_with_closed_pipe(code) == (console.EXIT_BROKEN_PIPE, "")


def test_closed_pipe_with_remark_continues():
    code = (
        "console.configure(closed_output_remark='continuing silently')\n"
        "with console.flushed_output():\n"
        "  for _ in range(9): console.info('line')\n"
        "  console.error('finished')"
    )
    assert output_with_closed_pipe(code) == (0, "continuing silently\nfinished\n")


@pytest.mark.parametrize(
    ("windows", "line"),
    [(False, "python x.py --output_dir 'my runs/a'"), (True, 'python x.py --output_dir "my runs/a"')],
)
def test_command_line_is_quoted_for_its_shell(windows, line):
    assert command_line("python", "x.py", "--output_dir", "my runs/a", windows=windows) == line
    quote = '"' if windows else "'"
    fetched = fetch_command("https://example.org/a.pth", "/my cache/a.pth", windows=windows)
    assert fetched.endswith(f" -L --create-dirs -o {quote}/my cache/a.pth{quote} https://example.org/a.pth")


@pytest.mark.parametrize(
    ("system", "number", "is_closed"), [("nt", errno.EINVAL, True), ("posix", errno.EINVAL, False)]
)
def test_a_closed_pipe_of_windows_and_a_closed_terminal_are_closed_pipes(
    monkeypatch, system, number, is_closed
):
    monkeypatch.setattr(console.os, "name", system)
    found = console._as_broken_pipe(OSError(number, "reason"))
    assert isinstance(found, BrokenPipeError) == is_closed
