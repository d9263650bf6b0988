"""Command-line parsers generated from option declarations, the trainer's JSON file, and docs/flags.md."""

import argparse
import sys
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, NoReturn

from vae.config.declare import OptionValues, base_type, coerce, coerce_all, is_list, nearest
from vae.config.options import PROVENANCE, ActionConfig, all_options, section_title, sections
from vae.config.resolve import override
from vae.system import console, files
from vae.system.errors import UsageError, UserError


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError with a one-line message."""

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """The given flags; an unknown flag is reported before a missing one, because it is often the same."""
        known = [flag for action in self._actions for flag in action.option_strings]
        for word in argv:
            flag = word.split("=")[0]
            if flag.startswith("--") and flag != "--" and flag not in known and " " not in flag:
                listed = "--help_all" if "--help_all" in known else "--help"
                raise UsageError(f"unknown flag {flag}{nearest(flag, known)} ({listed} lists every flag)")
        return self.parse_args(argv)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print. argparse itself ignores a closed pipe or a full disk when a help text fills the buffer."""
        (file or sys.stderr).write(console.as_called(message))

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


# --help of train_vae.py shows these; docs/flags.md lists the others, and --help_all shows both.
_COMMON = """
list_profiles plan
channels z_channels init_from
data_path val_path val_split image_size num_workers persistent_workers
reconstruction_weight perceptual_weight perceptual_net kl_weight adversarial_weight disc_start
learning_rate weight_decay warmup_epochs gradient_clip ema_decay
mixed_precision use_bf16 enable_tf32 channels_last use_torch_compile
config profile output_dir resume_from batch_size accumulation_steps num_epochs num_steps find_lr
max_steps progressive checkpoint_freq keep_checkpoints save_samples_freq val_freq early_stopping seed
"""
COMMON = frozenset(_COMMON.split())
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def build_parser(*, everything: bool = False) -> OneLineParser:
    """The parser of train_vae.py. Its result contains only the flags that were given.

    Its help shows the flags in COMMON, or `everything`.
    """
    count = sum(len(fields(section)) for section in (ActionConfig, *sections().values()))
    parser = new_parser(
        "train_vae.py",
        "Train a high-resolution image VAE (AutoencoderKL) on a folder of images.",
        ("" if everything else f"--help_all shows all {count} flags. ")
        + "Each is also a key of the JSON file of --config.\nEvery on/off flag also has a --no- form. "
        "Precedence of sources: flag, JSON file, checkpoint,\nprofile, card, default.",
    )
    for name, section in {"actions": ActionConfig, **sections()}.items():
        group = parser.add_argument_group(name, section_title(section))
        for item in fields(section):
            _add(group, item, shown=everything or item.name in COMMON)
    add_help_all(parser)
    return parser


def new_parser(prog: str, description: str, epilog: str) -> OneLineParser:
    """A parser without flags, as every script has it."""
    return OneLineParser(
        prog=prog,
        usage=f"{prog} [flags]",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
    )


def add_help_all(parser: OneLineParser) -> None:
    """--help_all, for a parser that has been built with all of its flags shown if it is given."""
    parser.add_argument("--help_all", action="help", help="show every flag and exit")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows an on/off flag in one form: --[no-]NAME, or --NAME for one that is off by default."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=108)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return str(action.metavar)
        return super()._format_action_invocation(action)


def _add(group: argparse._ActionsContainer, item: Field[Any], *, shown: bool = True) -> None:
    text = default_text(item)
    default = {"required": " (required)", "none": "", "off": ""}.get(text, f" (default: {text})")
    help_text = f"{item.metadata['help']}{default}".replace("%", "%%") if shown else argparse.SUPPRESS
    if base_type(item) is bool:
        action = group.add_argument(f"--{item.name}", action=argparse.BooleanOptionalAction, help=help_text)
        action.metavar = f"--{item.name}" if item.default is False else f"--[no-]{item.name}"
        return
    choices = item.metadata["choices"]
    kind = int if item.metadata["auto"] else base_type(item)
    shown_choices = f"{{{','.join(map(str, choices))}}}" if choices else None
    group.add_argument(
        f"--{item.name}",
        required=item.default is MISSING,
        nargs="+" if is_list(item) else None,
        metavar=item.metadata["metavar"] or shown_choices or _METAVARS[kind],
        help=help_text,
    )


def default_text(item: Field[Any]) -> str:
    """An option's default as --help and docs/flags.md print it."""
    default: Any = item.default
    if default is MISSING:
        return "required"
    if default in (None, "", ()):
        return item.metadata["unset"] or ("auto" if base_type(item) is bool else "none")
    if isinstance(default, bool):
        return "on" if default else "off"
    parts = default if is_list(item) else [default]
    return " ".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts)


def parse_section(section: type, prog: str, description: str, epilog: str, argv: list[str]) -> Any:
    """Parse the command line of the script `prog` into `section`, a dataclass of options.

    Raises the errors of `coerce_values`.
    """
    return section(**coerce_values(section, parse_values(section, prog, description, epilog, argv)))


def parse_values(
    section: type, prog: str, description: str, epilog: str, argv: list[str], details: Collection[str] = ()
) -> OptionValues:
    """The words of the flags that were given; an option with the default MISSING is required.

    Only --help_all shows the options in `details`. Raises UsageError if the command line cannot be parsed.
    """
    parser = new_parser(prog, description, epilog)
    everything = "--help_all" in argv
    for item in fields(section):
        _add(parser, item, shown=everything or item.name not in details)
    if details:
        add_help_all(parser)
    return vars(parser.parse(argv))


def coerce_values(section: type, given: Mapping[str, Any]) -> OptionValues:
    """Values for the fields of `section`, from flags or from a call.

    Raises UsageError for a value of another type and UserError for one outside its limits.
    """
    return coerce_all({item.name: item for item in fields(section)}, given)


def parse_flags(argv: list[str]) -> OptionValues:
    """Option values of the trainer's command line; they override the values of its --config file.

    Raises UsageError for an unknown flag and UserError for a value outside its limits.
    """
    values = vars(build_parser(everything="--help_all" in argv).parse(argv))
    actions = {item.name: item for item in fields(ActionConfig)}
    return _with_file(coerce_all({**actions, **_options()}, values))


def trainer_options(given: Mapping[str, Any]) -> OptionValues:
    """The option values of a call, which override those of their --config file; raises as `parse_flags`."""
    return _with_file(coerce_all(_options(), given))


def _options() -> dict[str, Field[Any]]:
    return {name: item for name, (_, item) in all_options().items()}


def _with_file(values: OptionValues) -> OptionValues:
    if not values.get("config"):
        return values
    loaded = read_json(Path(values["config"]))
    if loaded.get("global_batch_size") is not None:  # a run saves both in its config.json
        loaded.pop("batch_size", None)
    return override(loaded, values)


def command_words(given: OptionValues) -> list[str]:
    """These option values as the words of a command line."""
    words = []
    for name, value in given.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list | tuple):
            words += [f"--{name}", *map(str, value)]
        elif str(value).startswith("-"):  # -1e-05 alone would be a flag
            words.append(f"--{name}={value}")
        else:
            words += [f"--{name}", str(value)]
    return words


def read_json(path: Path) -> OptionValues:
    """Option values from a JSON file that contains one object; UserError if one is unknown or invalid.

    null is the value of an option that has no default.
    """
    loaded = read_object(path, "--config", '{"image_size": 1024}')
    options = _options()
    values = {}
    for name, value in loaded.items():
        if (name == PROVENANCE and isinstance(value, dict)) or (name == "config" and value is None):
            continue  # in the config.json of a run
        if name == "config":
            raise UserError(f'--config {path} contains the key "config": put all options into one file')
        if name not in options:
            raise UserError(f'--config {path} has the unknown key "{name}"{nearest(name, options)}')
        try:
            values[name] = coerce(options[name], value)
        except UserError as error:
            raise UserError(f"--config {path}: {error}") from None
    return values


def read_object(path: Path, flag: str, example: str) -> dict[str, Any]:
    """The object in a JSON file; UserError names the flag."""
    where = f"{flag} {path}"
    try:
        loaded = files.read_json(path)
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{where} must contain one object, for example {example}")
    return loaded


# ---- docs/flags.md -----------------------------------------------------------------------------------------
def flags_markdown() -> str:
    """The whole page: every flag that --help leaves out, with its meaning and default."""
    lines = [
        "# More flags of train_vae.py",
        "",
        f"`python train_vae.py --help` shows the {len(COMMON)} most used flags, this page the others, and",
        "`--help_all` both. Each is also a key of the JSON file of `--config`, except the actions. Every",
        "on/off flag also has a `--no-` form. Without a default, it is off.",
    ]
    for name, section in {"actions": ActionConfig, **sections()}.items():
        lines += ["", f"## {name}", "", section_title(section), ""]
        lines += ["| flag and default | meaning |", "|---|---|"]
        for item in fields(section):
            if item.name in COMMON:
                continue
            choices = item.metadata["choices"]
            meaning = item.metadata["help"] + (f" ({', '.join(map(str, choices))})" if choices else "")
            default = default_text(item)
            lines.append(
                f"| `--{item.name}`{'' if default in ('none', 'off') else f' {default}'} | {meaning} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(flags_markdown(), end="")
