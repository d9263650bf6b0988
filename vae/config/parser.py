"""An argument parser with one-line messages that name the flag, the value and the remedy."""

import argparse
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from vae.config.values import nearest, unknown_choice
from vae.system.errors import UsageError

# Values that start with a minus, as flags do. argparse itself does not recognise -1e-4 as a number.
_NEGATIVE_NUMBER = re.compile(r"-(\.?\d.*|inf|infinity|nan)$", re.IGNORECASE)
_NO = ("no", "false", "off", "0")


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError with a one-line message."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = _NEGATIVE_NUMBER  # argparse has no public way to set it

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """The given flags; an unknown flag is reported before a missing one, because it is often the same."""
        known = [flag for action in self._actions for flag in action.option_strings]
        flags = [word.split("=")[0] for word in argv if word.startswith("--") and word != "--"]
        for flag in flags:
            if flag not in known and " " not in flag:
                raise UsageError(unknown_flag(flag, known))
        given, unknown = self.parse_known_args(argv)
        if unknown and unknown[0].startswith("-"):
            raise UsageError(unknown_flag(unknown[0].split("=")[0], known))
        if unknown:
            before = argv[argv.index(unknown[0]) - 1] if argv.index(unknown[0]) else ""
            if before in self._switches():
                raise UsageError(_needless_value(before, unknown[0]))
            raise UsageError(f"{unknown[0]} does not follow a flag: put a path with spaces in quotes")
        return given

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print. argparse itself ignores a closed pipe or a full disk when a help text fills the buffer."""
        (file or sys.stderr).write(message)

    def _list(self) -> str:
        return where_listed(flag for action in self._actions for flag in action.option_strings)

    def _switches(self) -> list[str]:
        """The flags without a value."""
        return [flag for action in self._actions if action.nargs == 0 for flag in action.option_strings]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise UsageError with a suggestion; argparse only lists the choices."""
        if action.choices is not None and value not in action.choices:
            raise UsageError(unknown_choice(action.option_strings[0], value, action.choices))

    def error(self, message: str) -> NoReturn:
        raise UsageError(self._reworded(message) or f"{message} ({self._list()})")

    def _reworded(self, message: str) -> str | None:
        """A message of argparse with the remedy; None for those that nothing is known about."""
        if match := re.fullmatch(r"argument (--\w+)\S*: invalid (int|float) value: '(.*)'", message):
            flag, kind, value = match.groups()
            is_list = any(action.nargs == "+" for action in self._actions if flag in action.option_strings)
            remedy = _without_commas(value, is_list)
            return f"{flag} {value} is not a {'whole ' if kind == 'int' else ''}number{remedy}"
        if match := re.fullmatch(r"argument (--\w+)\S*: ignored explicit argument '(.*)'", message):
            return _needless_value(*match.groups())
        if match := re.fullmatch(r"argument (--\w+)\S*: expected (one|at least one) argument", message):
            return f"{match[1]} needs a value; one that starts with a minus is written {match[1]}=VALUE"
        if match := re.fullmatch(r"the following arguments are required: (.*)", message):
            return f"{match[1]} {'are' if ',' in match[1] else 'is'} missing ({self._list()})"
        return None


def _needless_value(flag: str, value: str) -> str:
    opposite = flag.replace("--no-", "--") if flag.startswith("--no-") else flag.replace("--", "--no-", 1)
    remedy = f"write {opposite}" if value.lower() in _NO else f"leave out {value}"
    if flag == "--mixed_precision" and value.lower() not in _NO:
        remedy += (
            "; it is fp16 on a GPU, and bf16 on a CPU with instructions for it (--use_bf16: bf16 or an error)"
        )
    return f"{flag} {value}: this flag has no value: {remedy}"


def _without_commas(value: str, is_list: bool) -> str:
    """The remedy for numbers with commas: values of a list, or a decimal comma."""
    if not is_list and (match := re.fullmatch(r"(\d+)x\1|(\d{2,}), ?\2", value)):
        return f": write {match[1] or match[2]}"  # crops are square
    if not re.fullmatch(r"-?\d+(, ?\d+)+", value):
        return ""
    if is_list:
        return f": write {re.sub(', ?', ' ', value)}"
    return f": write {value.replace(',', '.')}" if value.count(",") == 1 else ""


def unknown_flag(flag: str, known: Iterable[str]) -> str:
    """The message about a flag that does not exist."""
    known = list(known)
    return f"unknown flag {flag}{nearest(flag, known)} ({where_listed(known)})"


def where_listed(flags: Iterable[str]) -> str:
    """Which of these flags shows all others."""
    return f"{'--help_all' if '--help_all' in flags else '--help'} lists every flag"
