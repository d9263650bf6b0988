"""An argument parser that raises one-line errors, and suggests a flag for an unknown one."""

import argparse
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from vae.config.values import nearest
from vae.system.errors import UsageError


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError with a one-line message."""

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """The given flags; an unknown flag is reported before a missing one, because it is often the same."""
        known = [flag for action in self._actions for flag in action.option_strings]
        for word in argv:
            flag = word.split("=")[0]
            if flag.startswith("--") and flag != "--" and flag not in known and " " not in flag:
                raise UsageError(unknown_flag(flag, known))
        return self.parse_args(argv)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print. argparse itself ignores a closed pipe or a full disk when a help text fills the buffer."""
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def unknown_flag(flag: str, known: Iterable[str]) -> str:
    """The message about a flag that does not exist."""
    known = list(known)
    listed = "--help_all" if "--help_all" in known else "--help"
    return f"unknown flag {flag}{nearest(flag, known)} ({listed} lists every flag)"
