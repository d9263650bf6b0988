"""Console output of every script: lines for people, shell commands to copy, and closed output streams."""

import errno
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from vae.system.addresses import public_text

STDERR = 2  # file descriptor
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE: what a shell reports for a program that SIGPIPE ended


@dataclass
class _Settings:
    is_main_process: bool = True
    closed_output_remark: str | None = None
    failure_reported: bool = False


_settings = _Settings()


def configure(*, is_main_process: bool = True, closed_output_remark: str | None = None) -> None:
    """Set how this process prints, for all callers.

    Only the main process of a distributed run prints. With `closed_output_remark`, the process survives when
    the reader of its output closes the pipe: it prints the remark to stderr once and continues silently.
    """
    _settings.is_main_process = is_main_process
    _settings.closed_output_remark = closed_output_remark
    _settings.failure_reported = False


def is_main_process() -> bool:
    """Whether this process prints what only the main process prints."""
    return _settings.is_main_process


def info(text: str) -> None:
    """Print lines to stdout from the main process, above a progress bar if one is shown.

    As all that is printed, without control characters and credentials (`public_line`).
    """
    if not _settings.is_main_process:
        return
    try:
        _print(text, sys.stdout)
    except BrokenPipeError:  # for example `| head -1`
        if _settings.closed_output_remark is None:
            raise
        discard(sys.stdout)
        try:
            _print(_settings.closed_output_remark, sys.stderr)
        except BrokenPipeError:  # for example `2>&1 | head -1`
            discard(sys.stderr)
    except OSError as error:  # `> file` on a full disk: the next line is tried again
        if _settings.closed_output_remark is None:
            raise
        if not _settings.failure_reported:
            _settings.failure_reported = True
            error_from_signal_handler(f"the output cannot be written: {error.strerror}; training continues")


def warning(text: str) -> None:
    """Print one line that starts with WARNING, in the same way as `info`."""
    info(f"WARNING: {public_line(text)}")


def error(text: str) -> None:
    """Print a line to stderr, from any process, above a progress bar if one is shown.

    Without space for it, for example with `2> file` on a full disk, the exit code alone reports the error.
    """
    try:
        _print(text, sys.stderr)
    except BrokenPipeError:
        raise
    except OSError:
        discard(sys.stderr)


def progress(text: str) -> None:
    """Print a line about progress to stderr, from the main process; a closed stderr is no error."""
    if _settings.is_main_process:
        try:
            _print(text, sys.stderr)
        except BrokenPipeError:
            discard(sys.stderr)


def error_from_signal_handler(text: str) -> None:
    """Write a line to stderr at once, without `print`, which the signal may have interrupted."""
    text = public_line(text)
    line = f"\n{text}\n" if os.isatty(STDERR) else f"{text}\n"  # a terminal may show a progress bar or ^C
    with suppress(OSError):  # stderr is closed
        os.write(STDERR, line.encode("ascii", "backslashreplace"))


def _print(text: str, stream: TextIO) -> None:
    """Print lines; BrokenPipeError if the reader of the pipe or the terminal is gone."""
    text = "\n".join(map(public_line, text.split("\n")))
    tqdm = sys.modules.get("tqdm")  # no progress bar is shown if nothing has imported tqdm
    try:
        if tqdm is not None:
            tqdm.tqdm.write(text, file=stream)
        else:
            print(text, file=stream)
        stream.flush()  # a reader behind a pipe sees the line now
    except OSError as error:
        raise _as_broken_pipe(error) from None


def _as_broken_pipe(error: OSError) -> OSError:
    """BrokenPipeError for a closed terminal of Linux and a closed pipe of Windows; else the error itself."""
    is_closed = error.errno == errno.EIO or (os.name == "nt" and error.errno == errno.EINVAL)
    return BrokenPipeError(*error.args) if is_closed else error


def discard(stream: TextIO) -> None:
    """Send the stream's buffered and later output to the null device: flushing it would fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextmanager
def flushed_output() -> Iterator[None]:
    """Flush stdout at the end; exit silently with EXIT_BROKEN_PIPE if its reader has closed the pipe."""
    try:
        try:
            yield
        finally:
            try:
                sys.stdout.flush()
            except OSError as error:
                raise _as_broken_pipe(error) from None
    except BrokenPipeError:
        discard(sys.stdout)
        sys.exit(EXIT_BROKEN_PIPE)


def counted(number: int, noun: str) -> str:
    """A number and its noun: 1 step, 2 steps."""
    return f"{number} {noun}{'s' * (number != 1)}"


def printable(text: str) -> str:
    """The text as one line that every terminal and UTF-8 file accepts; other characters are escaped."""
    encodable = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in encodable)


def public_line(text: str) -> str:
    """A line of a message: without control characters, and without credentials in addresses."""
    return public_text(printable(text))


def command_line(*words: str | os.PathLike[str], windows: bool = os.name == "nt") -> str:
    """The words as one command for the system's shell, quoted where necessary."""
    texts = [os.fspath(word) for word in words]
    return subprocess.list2cmdline(texts) if windows else shlex.join(texts)


def fetch_command(url: str, path: str | os.PathLike[str], windows: bool = os.name == "nt") -> str:
    """The command that downloads `url` to `path`, with a program that every supported system includes."""
    curl = "curl.exe" if windows else "curl"  # PowerShell's `curl` is an alias of another program
    return command_line(curl, "-L", "--create-dirs", "-o", path, url, windows=windows)
