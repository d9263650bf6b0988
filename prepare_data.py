#!/usr/bin/env python3
"""Make a training set out of raw pictures: clean it, check it, look at it, split it; or draw a demo set."""

import argparse
import signal
import sys

from vae.config.errors import EXIT_DATA, EXIT_FAILED, EXIT_INTERRUPTED, UsageError, UserError


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str):
        raise UsageError(f"{message}; --help lists the flags")


def _switch(parser: argparse.ArgumentParser, name: str, default: bool, text: str) -> None:
    parser.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=text)


def _flags_of_reading(parser: argparse.ArgumentParser) -> None:
    """Flags of every mode that decodes pictures."""
    parser.add_argument("--input_dir", required=True, metavar="DIR", help="folder of pictures, of any depth")
    parser.add_argument(
        "--min_size", type=int, default=1, metavar="PX", help="reject a shorter side below this"
    )
    parser.add_argument(
        "--max_aspect",
        type=float,
        default=0.0,
        metavar="X",
        help="reject a longer side beyond X times the shorter; 0: any",
    )
    parser.add_argument(
        "--max_pixels",
        type=int,
        default=300_000_000,
        metavar="N",
        help="reject more pixels, before decoding them",
    )
    parser.add_argument(
        "--background", default="white", metavar="COLOR", help="colour laid under transparent pixels"
    )
    _switch(
        parser,
        "--first_frame",
        False,
        "take the first frame of animations and pages instead of rejecting them",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N files by name")
    _flags_of_workers(parser)


def _flags_of_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num_workers", default="auto", metavar="N", help="processes; auto: one per usable core"
    )
    parser.add_argument("--time_limit", type=float, default=60.0, metavar="SECONDS", help="of one picture")
    parser.add_argument(
        "--memory_gib",
        type=float,
        metavar="GIB",
        help="of one picture; default: 16 bytes for each of --max_pixels, and 1 GiB",
    )


def _flags_of_preprocess(parser: argparse.ArgumentParser) -> None:
    _flags_of_reading(parser)
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="new, or begun by this command")
    parser.add_argument(
        "--target_size",
        type=int,
        nargs="+",
        default=[1024],
        metavar="PX",
        help="one or several; several get a sub-folder each",
    )
    parser.add_argument(
        "--resize_mode",
        choices=("cover", "contain", "crop", "pad", "stretch", "longest"),
        default="cover",
        help="cover: shorter side; longest: longer side; contain: longer side, never larger than it was; "
        "crop: cover, then the middle square; pad: longest, then a square with --background; stretch: a square",
    )
    parser.add_argument("--format", choices=("jpeg", "png", "webp"), default="jpeg", help="of the output")
    parser.add_argument("--quality", type=int, metavar="1-100", help="of jpeg and webp; default 95")
    _switch(parser, "--upscale", False, "enlarge pictures that are too small instead of rejecting them")


def _flags_of_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output_file", default="validation_report.json", metavar="FILE", help="report as JSON"
    )
    _switch(parser, "--csv", True, "also a table of all files beside the report")
    _switch(parser, "--strict", False, f"exit with {EXIT_DATA} when anything was rejected")
    parser.add_argument("--quarantine_dir", metavar="DIR", help="move rejected files there")
    _switch(
        parser, "--undo_quarantine", False, "move everything in --quarantine_dir back, and do nothing else"
    )
    _flags_of_reading(parser)


def _flags_of_analyze(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output_file",
        default="dataset_stats.json",
        metavar="FILE",
        help="JSON; the page lies beside it",
    )
    _flags_of_reading(parser)


def _flags_of_split(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input_dir", required=True, metavar="DIR", help="folder that holds a manifest")
    parser.add_argument(
        "--val_split",
        type=float,
        metavar="SHARE",
        help="share held out; first 0.1, unless --num_folds is given",
    )
    parser.add_argument("--num_folds", type=int, metavar="K", help="folds of the rest; first none")
    parser.add_argument(
        "--group_by",
        metavar="RULE",
        help="what must stay together: near_duplicates (default), manifest (its own groups), folder:N (the N "
        "outermost folders) or a column of --features",
    )
    parser.add_argument(
        "--label_by", metavar="RULE", help="balance by this: manifest, folder:N or a column of --features"
    )
    parser.add_argument("--features", metavar="FILE", help="CSV with the columns id, filepath and others")
    parser.add_argument("--labels", metavar="FILE", help="CSV with id and a label, or one-hot columns")
    parser.add_argument("--seed", type=int, metavar="N", help="another seed gives other sides; first 0")
    parser.add_argument("--num_workers", default="auto", metavar="N", help="processes; auto: one a core")


def _flags_of_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output_dir", default="./data/demo", metavar="DIR", help="folder for the pictures")
    parser.add_argument("--count", type=int, default=64, help="number of pictures")
    parser.add_argument("--target_size", type=int, default=256, metavar="PX", help="side of the pictures")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other pictures")
    parser.add_argument("--format", choices=("png", "jpeg"), default="png", help="jpeg: quality 95, 4:4:4")
    parser.add_argument("--num_workers", default="auto", metavar="N", help="drawing processes")


def _rules(arguments: argparse.Namespace):
    from vae.prepare.checking import Rules

    names = ("max_pixels", "background", "first_frame", "min_size", "max_aspect")
    return Rules(**{name: getattr(arguments, name) for name in names})


def _common(arguments: argparse.Namespace) -> dict:
    names = ("input_dir", "limit", "num_workers", "time_limit", "memory_gib")
    return {name: getattr(arguments, name) for name in names}


def run_preprocess(arguments: argparse.Namespace) -> int:
    """Raw pictures in, a training set out."""
    from vae.prepare.converting import Recipe
    from vae.prepare.preprocessing import PreprocessOptions, preprocess, summarize

    if arguments.quality is not None and arguments.format == "png":
        raise UsageError("--quality says nothing about --format png, which loses nothing: leave it out")
    if len(set(arguments.target_size)) < len(arguments.target_size):
        raise UsageError(f"--target_size {' '.join(map(str, arguments.target_size))} names one size twice")
    recipe = Recipe(
        target_sizes=tuple(arguments.target_size),
        resize_mode=arguments.resize_mode,
        format=arguments.format,
        quality=95 if arguments.quality is None else arguments.quality,
        upscale=arguments.upscale,
        rules=_rules(arguments),
    )
    _say_what_is_missing()
    outcome = preprocess(
        PreprocessOptions(output_dir=arguments.output_dir, recipe=recipe, **_common(arguments))
    )
    summarize(outcome, arguments.output_dir)
    return 0 if outcome.accepted else EXIT_DATA


def run_validate(arguments: argparse.Namespace) -> int:
    """Decode everything and report."""
    from vae.prepare.quarantine import undo
    from vae.prepare.validating import ValidateOptions, validate

    if arguments.undo_quarantine:
        if not arguments.quarantine_dir:
            raise UsageError("--undo_quarantine needs --quarantine_dir: the folder to empty")
        moved, left = undo(arguments.quarantine_dir)
        print(f"{arguments.quarantine_dir}: {moved} files moved back, {left} left")
        return EXIT_DATA if left else 0
    if arguments.quarantine_dir and arguments.limit is not None:
        raise UsageError("--quarantine_dir with --limit would leave the rest unjudged: leave one of them out")
    _say_what_is_missing()
    report = validate(
        ValidateOptions(
            output_file=arguments.output_file,
            csv=arguments.csv,
            quarantine_dir=arguments.quarantine_dir,
            rules=_rules(arguments),
            **_common(arguments),
        )
    )
    return EXIT_DATA if arguments.strict and report.rejected else 0


def run_analyze(arguments: argparse.Namespace) -> int:
    """What the set is like."""
    from pathlib import Path

    from vae.prepare.analysis import AnalyzeOptions, analyze, summary_lines

    options = AnalyzeOptions(output_file=arguments.output_file, rules=_rules(arguments), **_common(arguments))
    print(*summary_lines(analyze(options), Path(arguments.output_file)), sep="\n")
    return 0


def run_split(arguments: argparse.Namespace) -> int:
    """Which pictures train and which validate."""
    from vae.prepare.pool import count_workers
    from vae.prepare.splitting import split_manifest

    report = split_manifest(
        arguments.input_dir,
        val_split=arguments.val_split,
        num_folds=arguments.num_folds,
        group_by=arguments.group_by,
        label_by=arguments.label_by,
        features_file=arguments.features,
        labels_file=arguments.labels,
        seed=arguments.seed,
        num_workers=count_workers(arguments.num_workers),
    )
    print(*report.lines(), sep="\n")
    return 0


def run_demo(arguments: argparse.Namespace) -> int:
    """Draw pictures."""
    from vae.data.workers import resolve_num_workers
    from vae.prepare.writing import DemoSettings, write_demo

    settings = DemoSettings(arguments.target_size, arguments.seed, arguments.format)
    workers = resolve_num_workers(arguments.num_workers)
    drawn = write_demo(arguments.output_dir, arguments.count, settings, workers)
    print(f"{arguments.output_dir}: {arguments.count} pictures, {drawn} of them drawn now")
    return 0


MODES = {
    "preprocess": (_flags_of_preprocess, run_preprocess),
    "validate": (_flags_of_validate, run_validate),
    "analyze": (_flags_of_analyze, run_analyze),
    "split": (_flags_of_split, run_split),
    "demo": (_flags_of_demo, run_demo),
}
# Values that are too small or too large wherever such a flag is known.
LEAST = {"count": 1, "seed": 0, "min_size": 1, "max_pixels": 1, "limit": 1, "target_size": 8, "quality": 1}
ABOVE_ZERO = ("time_limit", "memory_gib")


def _say_what_is_missing() -> None:
    from vae.data.strict_jpeg import has_simplejpeg
    from vae.prepare.resizing import engine

    if not has_simplejpeg():
        print(
            "simplejpeg is not installed: damage inside JPEGs goes unnoticed, and reading takes 3x the time"
        )
    if engine() == "Pillow":
        print("pyvips is not installed: Pillow resizes instead, with the same quality, in 7x the time")


def parser_of(mode: str) -> argparse.ArgumentParser:
    """The flags of one mode."""
    parser = OneLineParser(
        prog=f"prepare_data.py --mode {mode}",
        description=MODES[mode][1].__doc__,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    MODES[mode][0](parser)
    return parser


def read_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; raises UsageError where it cannot be read."""
    first = OneLineParser(description=__doc__, allow_abbrev=False, add_help=False)
    first.add_argument("--mode", choices=MODES)
    known, others = first.parse_known_args(argv)
    if known.mode is None:
        if not {"-h", "--help"} & set(others):
            raise UsageError(f"--mode is missing: give one of {', '.join(MODES)}; --help lists the flags")
        print(__doc__, *(parser_of(mode).format_help() for mode in MODES), sep="\n\n")
        sys.exit(0)
    parser = parser_of(known.mode)
    others = ["--input_dir=", *others] if "--undo_quarantine" in others else others  # needs no input
    arguments, unknown = parser.parse_known_args(others)
    for flag in unknown:
        owners = [mode for mode in MODES if flag.split("=")[0] in parser_of(mode)._option_string_actions]
        if owners:
            raise UsageError(f"{flag} belongs to --mode {' and '.join(owners)}, not to --mode {known.mode}")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    _check_values(arguments)
    arguments.mode = known.mode
    return arguments


def _check_values(arguments: argparse.Namespace) -> None:
    for name, value in vars(arguments).items():
        for part in value if isinstance(value, list) else [value]:
            if part is None:
                continue
            if name in LEAST and part < LEAST[name]:
                raise UsageError(f"--{name} {part} is too small: the least is {LEAST[name]}")
            if name in ABOVE_ZERO and not 0 < part < float("inf"):
                raise UsageError(f"--{name} {part} is no limit: give a number above 0")
            if name == "quality" and part > 100:
                raise UsageError(f"--quality {part} is too large: the most is 100")
            if name == "max_aspect" and not (part == 0 or 1 <= part < float("inf")):
                raise UsageError(f"--max_aspect {part} is no ratio: give 1 or more, or 0 for any")


def main() -> int:
    """Run one mode; a user's mistake is one line and an exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as cleanly as Ctrl-C
    try:
        arguments = read_arguments()
        return MODES[arguments.mode][1](arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed: run setup.sh or setup_windows.bat", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
