"""How every script ends: a mistake is one line and its exit code, and nobody has to read what is printed."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TextIO

from vae.config.errors import EXIT_BROKEN_PIPE, EXIT_FAILED, EXIT_INTERRUPTED, UserError

ROOT = Path(__file__).resolve().parent.parent.parent
SETUP = "setup_windows.bat" if os.name == "nt" else "./setup.sh"


def command_line(*words: str | os.PathLike, windows: bool = os.name == "nt") -> str:
    """The words as one line for the shell of this system, quoted where they need it."""
    texts = [os.fspath(word) for word in words]
    return subprocess.list2cmdline(texts) if windows else shlex.join(texts)


def fetch_command(url: str, path: str | os.PathLike, windows: bool = os.name == "nt") -> str:
    """The line that downloads `url` to `path`, in a folder it makes, with what every system brings along."""
    curl = "curl.exe" if windows else "curl"  # in PowerShell plain curl is another program
    return command_line(curl, "-L", "--create-dirs", "-o", path, url, windows=windows)


def run_script(name: str, main: Callable[[list[str]], int], stopped: str = "stopped") -> NoReturn:
    """Run `main` on the command line of the script `name`, and end the process with its exit code.

    `stopped` is said where Ctrl-C or SIGTERM ends it.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as cleanly as Ctrl-C
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by whoever started us, as by >&-
            setattr(sys, stream, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        getattr(sys, stream).reconfigure(errors="backslashreplace")  # names a terminal has no letters for
    with flushed_output():
        sys.exit(exit_code(name, main, sys.argv[1:], stopped))


def exit_code(name: str, main: Callable[[list[str]], int], argv: list[str], stopped: str = "stopped") -> int:
    """What `main(argv)` returns, or the code of the error that ends it, after one line on stderr."""
    try:
        code = main(argv)
        sys.stdout.flush()  # into a full disk it fails only now
        return code
    except UserError as error:
        line, code = str(error), error.exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "vae").split(".")[0]
        if package == "vae":
            raise  # a mistake of ours
        line, code = f"{package} is not installed: run {SETUP}{_or_activate(ROOT)}", EXIT_FAILED
    except BrokenPipeError:
        raise  # flushed_output ends it
    except OSError as error:  # a full disk, a folder taken away: nothing of ours to mend
        line, code = str(error), EXIT_FAILED
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        return EXIT_INTERRUPTED
    print(f"{name}: {line}", file=sys.stderr)
    return code


def _or_activate(root: Path, windows: bool = os.name == "nt") -> str:
    """The other remedy of a package that is missing, where setup has made an environment we do not run in."""
    script = Path(".venv", "Scripts", "activate") if windows else Path(".venv", "bin", "activate")
    if not (root / script).exists() or Path(sys.prefix).resolve() == (root / ".venv").resolve():
        return ""
    shown = script if Path.cwd() == root else root / script
    words = [shown] if windows else ["source", shown]
    return f", or activate the environment: {command_line(*words, windows=windows)}"


@contextmanager
def flushed_output() -> Iterator[None]:
    """Ends the process without a message where the reader of its output has left, as under `| head`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        sys.exit(EXIT_BROKEN_PIPE)


def discard(stream: TextIO) -> None:
    """Let all further output vanish, and what is buffered: it would fail again when Python flushes it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
