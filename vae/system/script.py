"""Runs the main function of every script: a user's mistake is one line on stderr and an exit code."""

import atexit
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from vae.system import console
from vae.system.errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError
from vae.system.files import long_path_remedy
from vae.system.gpus import set_gpu_memory_variables

ROOT = Path(__file__).resolve().parents[2]
SETUP = "setup_windows.bat" if os.name == "nt" else "./setup.sh"
EXTRAS = {"duckdb": "prepare", "pebble": "prepare", "jinja2": "report"}  # by module, as in pyproject.toml
# A user can move the caches of PyTorch and its companions with these environment variables.
CACHE_VARIABLES = (
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_HOME", "HF_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR",
)  # fmt: skip
MISSING_RUNTIME = (
    "a DLL that PyTorch needs is missing, usually one of Microsoft's Visual C++ runtime "
    "(VCRUNTIME140_THREADS.dll, MSVCP140.dll): run setup_windows.bat, which installs it, or install "
    "https://aka.ms/vs/17/release/vc_redist.x64.exe"
)


def run_script(name: str, main: Callable[[list[str]], int], stopped: str = "stopped") -> NoReturn:
    """Run `main` with the command line of the script `name`, then exit the process with its exit code.

    `stopped` is printed if Ctrl-C, SIGTERM or SIGHUP ends it.
    """
    codes: list[int] = []  # none if an exception ends it
    limit_spinning()
    set_gpu_memory_variables()
    console.install_handler()
    if not is_interactive():
        # Registered before anything is imported, so the last one to run: handlers run in reverse order.
        atexit.register(lambda: codes and end_process(codes[0]))
        _stop_on_signals(stopped)
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the parent process closed it, for example with >&-
            setattr(sys, stream, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        if isinstance(getattr(sys, stream), io.TextIOWrapper):  # file names that cannot be encoded
            getattr(sys, stream).reconfigure(errors="backslashreplace")
    with console.flushed_output():
        code = exit_code(name, main, sys.argv[1:], stopped)
    codes.append(code)
    sys.exit(code)


def is_interactive() -> bool:
    """Whether IPython runs the script, with %run: the process and its signals are not the script's."""
    return "IPython" in sys.modules


def _stop_on_signals(stopped: str) -> None:
    interrupt = partial(_interrupt, stopped)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)  # the same clean end as Ctrl-C
    hangup = getattr(signal, "SIGHUP", None)  # the terminal was closed; Windows has none, nohup ignores it
    if hangup is not None and signal.getsignal(hangup) == signal.SIG_DFL:
        signal.signal(hangup, interrupt)


def _interrupt(stopped: str, _number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; but end the process within an import, which could turn it into any error."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            console.error_from_signal_handler(stopped)
            os._exit(EXIT_INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def end_process(code: int) -> NoReturn:
    """End the process now: Python does not take itself apart, and no further exit handler runs.

    A thread of PyTorch that frees a Python object meanwhile would end the process with "terminate called
    without an active exception": after a step on a GPU this happened once in 60 processes.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            console.flush(stream)
    os._exit(code)


def limit_spinning() -> None:
    """Make OpenMP threads wait actively for about 0.1 ms only, before PyTorch reads the settings.

    By default they spin for longer. If another program needs the cores, a thread that waits then takes time
    from the thread that it waits for. Threads that sleep at once are slow too: waking them takes longer than
    most pauses between operations. A user's own setting wins. Measured: benchmarks/LOG.md, "Precision and
    threads on a CPU".
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # for other OpenMP libraries than GNU's
        os.environ["GOMP_SPINCOUNT"] = "50000"  # turns of a waiting loop


def exit_code(name: str, main: Callable[[list[str]], int], argv: list[str], stopped: str = "stopped") -> int:
    """The result of `main(argv)`, or the exit code of the error that ended it, printed as one line."""
    try:
        code = main(argv)
        console.flush(sys.stdout)  # a full disk fails here
        return code
    except UserError as error:
        line = str(error)
        code = error.exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "vae").split(".")[0]
        if package == "vae":
            raise  # our own bug
        line = f"{package} is not installed: {_way_to_install(package)}"
        code = EXIT_FAILED
    except (ImportError, MemoryError) as error:
        if "vae." in str(error):
            raise  # our own bug
        cause = f"too little memory (ulimit -v), or a damaged package: run {SETUP}"
        line = missing_runtime(str(error)) or f"{str(error) or 'out of memory'}: {cause}"
        code = EXIT_FAILED
    except BrokenPipeError:
        raise  # console.flushed_output handles it
    except OSError as error:  # a full disk or a removed folder: not a bug
        line = system_error_line(error)
        code = EXIT_FAILED
    except KeyboardInterrupt:
        console.error(stopped)
        return EXIT_INTERRUPTED
    console.error(f"{name}: {line}")
    return code


def _way_to_install(package: str) -> str:
    if (ROOT / "setup.sh").exists():
        return f"run {SETUP}{activation_hint(ROOT)}"
    extra = EXTRAS.get(package)
    return f"run pip install {f'vae-trainer[{extra}]' if extra else package}"


def system_error_line(error: OSError) -> str:
    """The message of an error of the system with the file, and the remedy if it is known."""
    if missing := missing_runtime(str(error)):
        return missing
    if error.strerror is None:  # raised by us or by a library, with its own message
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = ": free some space, or give an output folder on another disk"
    else:
        remedy = _variable_remedy(error) or long_path_remedy(error)
    return f"{where}{error.strerror}{remedy}"


def _variable_remedy(error: OSError) -> str:
    """The environment variable that names the folder of caches that a package cannot use; else nothing."""
    path = Path(os.fsdecode(error.filename or ""))
    for name in filter(os.environ.get, CACHE_VARIABLES):
        folder = Path(os.environ[name])
        if path.name and (path.is_relative_to(folder) or folder.is_relative_to(path)):
            return f": {name} is {folder}: set it to a folder that can be written, or unset it"
    return ""


def missing_runtime(error: str) -> str | None:
    """The cause and the remedy, if `error` says that Windows did not find a DLL of a package."""
    is_torch = "[WinError 126]" in error and "Error loading" in error  # its own words after those of Windows
    return MISSING_RUNTIME if is_torch or "DLL load failed" in error else None


def activation_hint(root: Path, windows: bool = os.name == "nt") -> str:
    """A second remedy for a missing package, if there is an environment that this process does not use."""
    script = Path(".venv", "Scripts", "activate") if windows else Path(".venv", "bin", "activate")
    is_active = Path(sys.prefix).resolve() == (root / ".venv").resolve()
    is_lost = not os.path.exists(os.environ.get("VIRTUAL_ENV", root))  # the project was moved
    if not (root / script).exists() or is_active or is_lost:
        return ""
    shown = script if Path.cwd() == root else root / script
    words = [shown] if windows else ["source", shown]
    return f", or activate the environment: {console.command_line(*words, windows=windows)}"
