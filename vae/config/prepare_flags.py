"""The command line of prepare_data.py: each mode knows its own flags, and whose a foreign flag is."""

import argparse
import sys

from vae.config.errors import EXIT_DATA, UsageError
from vae.config.flags import OneLineParser
from vae.config.options import MAX_PIXELS

# Values that are too small or too large wherever such a flag is known.
LEAST = {"count": 1, "seed": 0, "min_size": 1, "max_pixels": 1, "limit": 1, "target_size": 8, "quality": 1}
ABOVE_ZERO = ("time_limit", "memory_gib")


def _switch(parser: argparse.ArgumentParser, name: str, default: bool, text: str) -> None:
    parser.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=text)


def _flags_of_reading(parser: argparse.ArgumentParser) -> None:
    """Flags of every mode that decodes images."""
    parser.add_argument("--input_dir", required=True, metavar="DIR", help="folder of images, of any depth")
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
        default=MAX_PIXELS,
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
    parser.add_argument("--time_limit", type=float, default=60.0, metavar="SECONDS", help="of one image")
    parser.add_argument(
        "--memory_gib",
        type=float,
        metavar="GIB",
        help="of one image; default: 16 bytes for each of --max_pixels, and 1 GiB",
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
        "crop: cover, then the middle square; pad: longest, then squared by --background; stretch: a square",
    )
    parser.add_argument("--format", choices=("jpeg", "png", "webp"), default="jpeg", help="of the output")
    parser.add_argument("--quality", type=int, metavar="1-100", help="of jpeg and webp; default 95")
    _switch(parser, "--upscale", False, "enlarge images that are too small instead of rejecting them")


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
    parser.add_argument("--output_dir", default="./data/demo", metavar="DIR", help="folder for the images")
    parser.add_argument("--count", type=int, default=64, help="number of images")
    parser.add_argument("--target_size", type=int, default=256, metavar="PX", help="side of the images")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other images")
    parser.add_argument("--format", choices=("png", "jpeg"), default="png", help="jpeg: quality 95, 4:4:4")
    parser.add_argument("--num_workers", default="auto", metavar="N", help="drawing processes")


FLAGS_OF = {
    "preprocess": _flags_of_preprocess,
    "validate": _flags_of_validate,
    "analyze": _flags_of_analyze,
    "split": _flags_of_split,
    "demo": _flags_of_demo,
}


def parser_of(mode: str) -> argparse.ArgumentParser:
    """The flags of one mode."""
    parser = OneLineParser(
        prog=f"prepare_data.py --mode {mode}",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    FLAGS_OF[mode](parser)
    return parser


def read_arguments(description: str, argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, its mode in `mode`; raises UsageError where it cannot be read."""
    first = OneLineParser(allow_abbrev=False, add_help=False)
    first.add_argument("--mode", choices=FLAGS_OF)
    known, others = first.parse_known_args(argv)
    if known.mode is None:
        if not {"-h", "--help"} & set(others):
            raise UsageError(
                f"--mode is missing: give one of {', '.join(FLAGS_OF)} (--help lists every flag)"
            )
        print(description, *(parser_of(mode).format_help() for mode in FLAGS_OF), sep="\n\n")
        sys.exit(0)
    parser = parser_of(known.mode)
    others = ["--input_dir=", *others] if "--undo_quarantine" in others else others  # needs no input
    arguments, unknown = parser.parse_known_args(others)
    for flag in unknown:
        owners = [mode for mode in FLAGS_OF if flag.split("=")[0] in parser_of(mode)._option_string_actions]
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
