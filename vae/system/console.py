"""Console output of every script: lines for people, shell commands to copy, and closed output streams."""

import errno
import io
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TextIO

from vae.system.addresses import public_text

STDERR = 2  # file descriptor
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE: what a shell reports for a program that SIGPIPE ended


LOGGER = logging.getLogger("vae")  # every printed line is a record of it


@dataclass
class _Settings:
    is_main_process: bool = True
    closed_output_remark: str | None = None
    failure_reported: bool = False
    programs: dict[str, str] = field(default_factory=dict)  # by script


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

    As all that is printed, without control characters and credentials (`public_line`), and through `LOGGER`.
    """
    if _settings.is_main_process:
        _log(logging.INFO, text)


def warning(text: str) -> None:
    """Print one line that starts with WARNING, in the same way as `info`."""
    if _settings.is_main_process:
        _log(logging.WARNING, public_line(text))


def error(text: str) -> None:
    """Print a line to stderr, from any process, above a progress bar if one is shown.

    Without space for it, for example with `2> file` on a full disk, the exit code alone reports the error.
    """
    _log(logging.ERROR, text)


def progress(text: str) -> None:
    """Print a line about progress to stderr, from the main process; a closed stderr is no error."""
    if _settings.is_main_process:
        _log(logging.INFO, text, is_progress=True)


def _log(level: int, text: str, is_progress: bool = False) -> None:
    """Log lines; without a handler for them, in a notebook or a script of a user, print as the scripts do."""
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    text = "\n".join(map(public_line, text.split("\n")))
    extra = {"is_progress": is_progress}
    root = logging.getLogger()
    if LOGGER.handlers or (LOGGER.propagate and root.handlers and root.level <= logging.INFO):
        LOGGER.log(level, text, extra=extra, stacklevel=3)
    elif LOGGER.isEnabledFor(level):
        ConsoleHandler().emit(LOGGER.makeRecord(LOGGER.name, level, "", 0, text, (), None, extra=extra))


class ConsoleHandler(logging.Handler):
    """Prints what is logged: errors and progress to stderr, everything else to stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record; BrokenPipeError if nobody reads the output, unless a remark was configured."""
        text = record.getMessage()
        if record.levelno >= logging.ERROR:
            _to_stderr(text, is_progress=False)
        elif getattr(record, "is_progress", False):
            _to_stderr(text, is_progress=True)
        else:
            _to_stdout(f"WARNING: {text}" if record.levelno == logging.WARNING else text)


def install_handler() -> None:
    """Let this process print what is logged, as every script does; other handlers get it no longer."""
    if not LOGGER.handlers:
        LOGGER.addHandler(ConsoleHandler())
    LOGGER.propagate = False


def shows_progress() -> bool:
    """Whether this process prints lines about progress."""
    return _settings.is_main_process and LOGGER.isEnabledFor(logging.INFO)


def _to_stdout(text: str) -> None:
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


def _to_stderr(text: str, is_progress: bool) -> None:
    try:
        _print(text, sys.stderr)
    except BrokenPipeError:
        if not is_progress:
            raise
        discard(sys.stderr)
    except OSError:
        if is_progress:
            raise
        discard(sys.stderr)


def error_from_signal_handler(text: str) -> None:
    """Write a line to stderr at once, without `print`, which the signal may have interrupted."""
    text = public_line(text)
    line = f"\n{text}\n" if os.isatty(STDERR) else f"{text}\n"  # a terminal may show a progress bar or ^C
    with suppress(OSError):  # stderr is closed
        os.write(STDERR, line.encode("ascii", "backslashreplace"))


def _print(text: str, stream: TextIO | None) -> None:
    """Print lines; BrokenPipeError if the reader of the pipe is gone.

    A program without a console has no stream (None); those of notebooks and editors have few methods.
    """
    if stream is None:
        return
    tqdm = sys.modules.get("tqdm")  # no progress bar is shown if nothing has imported tqdm
    write = print if tqdm is None else tqdm.tqdm.write
    try:
        try:
            write(text, file=stream)
        except UnicodeEncodeError:
            write(text.encode("ascii", "backslashreplace").decode(), file=stream)
        flush(stream)  # a reader behind a pipe sees the line now
    except OSError as error:
        if error.errno != errno.EIO:
            raise _as_broken_pipe(error) from None
        discard(stream)  # the terminal was closed, and this process does not end with it: the work goes on


def flush(stream: TextIO | None) -> None:
    """Write what the stream still holds, if it can hold anything."""
    if stream is not None and hasattr(stream, "flush"):
        stream.flush()


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream shows a progress bar: a terminal, or the cell of a notebook."""
    if type(stream).__module__.startswith("ipykernel."):
        return True
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # it has no such method, or is closed
        return False


def _as_broken_pipe(error: OSError) -> OSError:
    """BrokenPipeError for a closed pipe of Windows; else the error itself."""
    is_closed = os.name == "nt" and error.errno == errno.EINVAL
    return BrokenPipeError(*error.args) if is_closed else error


def discard(stream: TextIO) -> None:
    """Send the stream's buffered and later output to the null device: flushing it would fail again."""
    with suppress(AttributeError, io.UnsupportedOperation):  # it is no file
        number = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)


@contextmanager
def flushed_output() -> Iterator[None]:
    """Flush stdout at the end; exit silently with EXIT_BROKEN_PIPE if its reader has closed the pipe."""
    try:
        try:
            yield
        finally:
            try:
                flush(sys.stdout)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise _as_broken_pipe(error) from None
                discard(sys.stdout)
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
    return as_called(public_text(printable(text)))


def print_programs(programs: dict[str, str]) -> None:
    """Print the names of programs in place of those of scripts, the keys: pip installs no scripts."""
    _settings.programs = programs


def as_called(text: str) -> str:
    """The text with the programs of `print_programs`: vae-train for train_vae.py or python train_vae.py."""
    for script, program in _settings.programs.items():
        text = re.sub(rf"(?<![\w./\\-])(python )?{re.escape(script)}\b", program, text)
    return text


def command_line(*words: str | os.PathLike[str], windows: bool = os.name == "nt") -> str:
    """The words as one command for the system's shell, quoted where necessary."""
    texts = [os.fspath(word) for word in words]
    return subprocess.list2cmdline(texts) if windows else shlex.join(texts)


def fetch_command(url: str, path: str | os.PathLike[str], windows: bool = os.name == "nt") -> str:
    """The command that downloads `url` to `path`, with a program that every supported system includes."""
    curl = "curl.exe" if windows else "curl"  # PowerShell's `curl` is an alias of another program
    return command_line(curl, "-L", "--create-dirs", "-o", path, url, windows=windows)
