"""Errors that a user can fix. Each one becomes a single line without a traceback, and an exit code."""

from vae.system.console import public_line

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SAVED_RESUMABLE = 75
EXIT_NON_FINITE = 76
EXIT_DATA = 77
EXIT_CONFIG = 78
EXIT_WORKER = 79
EXIT_INTERRUPTED = 130  # 128 + SIGINT


class UserError(ValueError):
    """A mistake that the user can fix; the message names the flag, the value and the remedy."""

    exit_code = EXIT_CONFIG

    def __init__(self, message: str):
        super().__init__(public_line(message))  # file names and addresses in it are of other people


class UsageError(UserError):
    """The command line cannot be parsed."""

    exit_code = EXIT_USAGE


class LostProcessError(UserError):
    """Another process of the run has ended, or cannot be reached."""

    exit_code = EXIT_FAILED


class DataError(UserError):
    """The images are missing, unreadable, too few or too small."""

    exit_code = EXIT_DATA


class WorkerError(DataError):
    """A decoding process has ended, or the system refuses what it needs."""

    exit_code = EXIT_WORKER


class NonFiniteError(UserError):
    """Training diverged: non-finite steps, or a loss that jumped and stayed."""

    exit_code = EXIT_NON_FINITE
