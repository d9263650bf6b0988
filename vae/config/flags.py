"""Command lines made from declared options, and the JSON file of the trainer."""

import argparse
import json
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from vae.config.errors import UsageError, UserError
from vae.config.options import Config, all_options
from vae.config.values import base_type, check, from_json, is_list, nearest


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaints are UsageErrors of one line."""

    def error(self, message: str):
        number = re.fullmatch(r"argument (--\w+): invalid (int|float) value: '(.*)'", message)
        if number:
            flag, kind, value = number.groups()
            raise UsageError(f"{flag} {value} is not a {'whole ' if kind == 'int' else ''}number")
        raise UsageError(f"{message} (--help lists every flag)")


def build_parser() -> argparse.ArgumentParser:
    """The trainer's parser, made from the declared options; only given flags appear in its result."""
    parser = OneLineParser(
        prog="train_vae.py",
        description="Train a high-resolution image VAE (AutoencoderKL) on a folder of images.",
        epilog="Order of settings: flag, JSON file, checkpoint, profile, card, default.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_help_format,
    )
    parser.add_argument("--list_profiles", action="store_true", help="list the profiles and stop")
    for section in fields(Config):
        title = section.default_factory.__doc__.strip()
        group = parser.add_argument_group(section.name, title)
        for item in fields(section.default_factory):
            _add(group, item)
    return parser


def _add(group: argparse._ActionsContainer, item: Field) -> None:
    required = item.default is MISSING
    default = "required" if required else f"default: {shown_default(item)}"
    help_text = f"{item.metadata['help']} ({default})".replace("%", "%%")
    if base_type(item) is bool:
        group.add_argument(f"--{item.name}", action=argparse.BooleanOptionalAction, help=help_text)
        return
    group.add_argument(
        f"--{item.name}",
        type=base_type(item),
        required=required,
        choices=item.metadata["choices"],
        nargs="+" if is_list(item) else None,
        metavar=item.metadata["metavar"] or (None if item.metadata["choices"] else base_type(item).__name__),
        help=help_text,
    )


def shown_default(item: Field) -> str:
    """An option's default as the help and docs/flags.md print it."""
    if item.default is None:
        return "none"
    if isinstance(item.default, bool):
        return "on" if item.default else "off"
    if is_list(item):
        return " ".join(map(str, item.default))
    return str(item.default)


def parse_section(section: type, prog: str, description: str, epilog: str, argv: list[str]) -> Any:
    """An instance of `section`, a dataclass of options, from the command line of the script `prog`.

    An option whose default is MISSING must be given. Raises UsageError for a command line that cannot be
    read and UserError for a value outside its limits.
    """
    parser = OneLineParser(
        prog=prog,
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_help_format,
    )
    for item in fields(section):
        _add(parser, item)
    given, unknown = parser.parse_known_args(argv)
    _refuse_unknown(parser, unknown)
    values = vars(given)
    for item in fields(section):
        if item.name in values:
            check(item, values[item.name])
            if is_list(item):
                values[item.name] = tuple(values[item.name])
    return section(**values)


def _help_format(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=108)


def _refuse_unknown(parser: argparse.ArgumentParser, unknown: list[str]) -> None:
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        word = unknown[0].split("=")[0]
        if not word.startswith("-"):
            raise UsageError(f"{unknown[0]} belongs to no flag: a path with spaces needs quotes")
        raise UsageError(f"unknown flag {word}{nearest(word, known)} (--help lists every flag)")


def parse_flags(argv: list[str]) -> dict[str, Any]:
    """Option values given on the command line, merged over those of its --config file.

    Raises UsageError for an unknown flag and UserError for a value outside its limits.
    """
    parser = build_parser()
    given, unknown = parser.parse_known_args(argv)
    _refuse_unknown(parser, unknown)
    values = vars(given)
    options = all_options()
    for name, value in values.items():
        if name in options:
            check(options[name][1], value)
    if values.get("config"):
        values = {**read_json(Path(values["config"])), **values}
    return values


def read_json(path: Path) -> dict[str, Any]:
    """Option values from a JSON file of one object; an unknown key is an error."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8-sig"))  # Windows editors begin with a mark
    except OSError as error:
        raise UserError(f"--config {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--config {path} is not valid JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise UserError(f'--config {path} must hold one object, like {{"image_size": 1024}}')
    options = all_options()
    values = {}
    for name, value in loaded.items():
        if name == "config":
            raise UserError(f'--config {path} names another "config": put all options into one file')
        if name not in options:
            raise UserError(f'--config {path} has the unknown key "{name}"{nearest(name, options)}')
        values[name] = from_json(options[name][1], value)
        check(options[name][1], values[name])
    return values
