"""Errors that are a user's to mend: one line, no traceback, and the exit code that says which kind."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SAVED_RESUMABLE = 75
EXIT_NON_FINITE = 76
EXIT_DATA = 77
EXIT_CONFIG = 78
EXIT_INTERRUPTED = 130  # 128 + SIGINT


class UserError(ValueError):
    """A mistake the user can mend: the message names the flag, the value and the remedy."""

    exit_code = EXIT_CONFIG


class UsageError(UserError):
    """The command line itself cannot be read."""

    exit_code = EXIT_USAGE


class DataError(UserError):
    """The images are missing, unreadable, too few or too small."""

    exit_code = EXIT_DATA


class NonFiniteError(UserError):
    """Training has met too many non-finite steps in a row."""

    exit_code = EXIT_NON_FINITE
