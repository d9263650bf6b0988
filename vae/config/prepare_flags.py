"""The options of prepare_data.py, each declared once: one dataclass per mode."""

import os
import sys
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from importlib.util import find_spec
from typing import Any

from vae.config.flags import parse_section
from vae.config.options import MAX_PIXELS, background_option, cache_dir_option, cache_gib_option, option
from vae.config.parser import OneLineParser, unknown_flag
from vae.config.values import most_similar
from vae.system import console
from vae.system.errors import EXIT_DATA, UsageError, UserError

MAX_PARTS = 10_000


def _part_option() -> Any:
    """--part, of the modes whose work is divided."""
    return option(
        None,
        "do this part of the work, 0/N to N-1/N, each with a ledger of its own; --mode merge joins them",
        metavar="I/N",
    )


def _remove_option(source: str) -> Any:
    """--remove, of the modes that make versions of a dataset."""
    return option(
        None,
        "text file with an image of --parent on each line: the SHA-256 of its file, its name as training "
        "prints it, or its url; the new version never reads these images, although its tar files still have "
        f"them; without {source}, nothing else changes",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class RulesConfig:
    """Options of every mode that accepts or rejects images: its rules, and what runs its tasks."""

    min_size: int = option(1, "reject images whose shorter side is below this", metavar="PX", at_least=1)
    max_aspect: float = option(
        0.0,
        "reject images whose longer side exceeds X times the shorter side; 0: any",
        metavar="X",
        at_least=0,
    )
    max_pixels: int = option(
        MAX_PIXELS, "reject images with more pixels, before decoding them", metavar="N", at_least=1
    )
    first_frame: bool = option(
        False, "use the first frame of animations and multi-page files instead of rejecting them"
    )
    num_workers: str = option(
        "auto", "processes, of each node with --engine ray; auto: one per usable core", metavar="N"
    )
    engine: str = option(
        "processes",
        "processes: of this machine; ray: on a Ray cluster, whose nodes must all see the input and the "
        "output folder under the same paths; pip install ray",
        choices=("processes", "ray"),
    )
    ray_address: str | None = option(
        None,
        "cluster of --engine ray, such as 10.0.0.1:6379",
        metavar="ADDRESS",
        unset="RAY_ADDRESS, or the cluster that runs on this machine, or a new one on it",
    )


@dataclass(frozen=True, kw_only=True)
class ReadingConfig(RulesConfig):
    """Options of every mode that decodes image files."""

    input_dir: str = option(MISSING, "folder of image files, of any depth", metavar="DIR")
    background: str = background_option()
    limit: int | None = option(None, "process only the first N files by name", metavar="N", at_least=1)
    time_limit: float = option(60.0, "time limit for one image", metavar="SECONDS")
    memory_gib: float | None = option(
        None,
        "memory limit for one image; not on Windows",
        metavar="GIB",
        unset="16 bytes per pixel of --max_pixels, plus 1 GiB",
    )


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(ReadingConfig):
    """Convert raw image files to a training set with a manifest."""

    output_dir: str = option(
        MISSING,
        "new or empty folder, or one that the same command has started to fill",
        metavar="DIR",
        writes=True,
    )
    part: str | None = _part_option()
    target_size: tuple[int, ...] = option(
        (1024,),
        "one or several sizes; several are written to a sub-folder each",
        metavar="PX",
        at_least=8,
    )
    resize_mode: str = option(
        "cover",
        "cover: scale the shorter side; longest: scale the longer side; contain: as longest, but never "
        "enlarge; crop: cover, then crop the centre square; pad: longest, then pad to a square with "
        "--background; stretch: scale both sides to a square",
        choices=("cover", "contain", "crop", "pad", "stretch", "longest"),
    )
    format: str = option("jpeg", "format of the output files", choices=("jpeg", "png", "webp"))
    quality: int = option(95, "quality of jpeg and webp", metavar="1-100", at_least=1, at_most=100)
    upscale: bool = option(False, "enlarge images that are too small instead of rejecting them")
    drop_duplicates: bool = option(
        False,
        "of each group of near duplicates that --mode analyze lists, keep only the image with most pixels",
    )


@dataclass(frozen=True, kw_only=True)
class ValidateConfig(ReadingConfig):
    """Decode every image file as the trainer does, and report the files that cannot be used."""

    output_file: str = option("validation_report.json", "report as JSON", metavar="FILE", writes=True)
    part: str | None = _part_option()
    csv: bool = option(True, "also write a table of all files beside the report")
    strict: bool = option(False, f"exit with {EXIT_DATA} if any file was rejected")
    val_path: str | None = option(
        None,
        "dataset of shards that must share no image with the one in --input_dir",
        metavar="FILE",
        unset="its validation set",
    )
    cache_dir: str | None = cache_dir_option()
    cache_gib: float = cache_gib_option("; it needs room for the largest shard")
    quarantine_dir: str | None = option(
        None, "move rejected files to this folder", metavar="DIR", writes=True
    )
    undo_quarantine: bool = option(
        False, "move every file in --quarantine_dir back into --input_dir, and do nothing else"
    )


@dataclass(frozen=True, kw_only=True)
class ShardConfig(ReadingConfig):
    """Pack image files, unchanged, into a dataset of tar shards for training."""

    output_dir: str = option(
        MISSING,
        "new or empty folder, or one that the same command has started to fill",
        metavar="DIR",
        writes=True,
    )
    part: str | None = _part_option()
    shard_mb: int = option(80, "size of a shard in megabytes", metavar="MB", at_least=1)
    val_split: float = option(
        0.05,
        "share of the images for a validation dataset; not used if a manifest defines the split",
        metavar="SHARE",
    )
    parent: str | None = option(
        None,
        "dataset.json of the version before this one: the new version has all its images too, in the same "
        "subsets, and only new files are decoded; unchanged shards are links to its files",
        metavar="FILE",
    )
    drop: bool = option(
        False, "leave out the images of --parent that --input_dir does not have; all files are decoded again"
    )
    remove: str | None = _remove_option("--input_dir")
    near_duplicates: bool = option(
        True,
        "keep images that look alike in one subset, and refuse a manifest whose split separates them",
    )


@dataclass(frozen=True, kw_only=True)
class IndexConfig(RulesConfig):
    """Index tar files that others wrote (WebDataset, img2dataset), where they are, for training."""

    input: str = option(
        MISSING,
        "folder or address/ with tar files, a pattern such as 's3://bucket/{00000..00099}.tar', or a .txt "
        "file with a path or address in each line; or the dataset.json of this mode, whose images are chosen "
        "by their sizes without reading tar files",
        metavar="TARS",
    )
    output_dir: str = option(
        MISSING,
        "new or empty folder, or one that the same command has started to fill",
        metavar="DIR",
        writes=True,
    )
    where: str | None = option(
        None,
        "keep only images whose metadata (json; txt: caption; cls: label) fulfil conditions such as "
        '"aesthetic>=5 and lang==en"',
        metavar="CONDITIONS",
        unset="all",
    )
    formats: tuple[str, ...] | None = option(
        None, "keep only images of these formats, such as jpeg png webp", metavar="NAME", unset="all"
    )
    image_key: str | None = option(
        None,
        "extension of the images, such as jpg or rgb.png, if samples have several",
        metavar="EXTENSION",
        unset="the first image of each sample",
    )
    val_split: float = option(
        0.0, "share of the images for a validation dataset, by the hash of their bytes", metavar="SHARE"
    )
    parent: str | None = option(
        None,
        "dataset.json of --mode index: the new version has all its images too, and only tar files of --input "
        "that it lacks are read; the indexes of the others are links to its files",
        metavar="FILE",
    )
    remove: str | None = _remove_option("--input")
    skip_broken_tars: bool = option(
        False, "leave out tar files that are broken or missing, instead of ending with an error"
    )


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig(ReadingConfig):
    """Measure a set of images; write the statistics as JSON and as an HTML page."""

    output_file: str = option(
        "dataset_stats.json",
        "statistics as JSON; the HTML page is written beside it",
        metavar="FILE",
        writes=True,
    )
    part: str | None = _part_option()


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """Join the parts of --part I/N."""

    output_dir: str | None = option(
        None,
        "output folder of the parts of shard or preprocess",
        metavar="DIR",
        unset="see --output_file",
        writes=True,
    )
    output_file: str | None = option(
        None,
        "report whose parts validate or analyze has made",
        metavar="FILE",
        unset="see --output_dir",
        writes=True,
    )
    num_workers: str = option("auto", "processes; auto: one per usable core", metavar="N")


PREVIOUS = "as in the previous split; first split: "


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Assign the images of a manifest to training and validation."""

    input_dir: str = option(MISSING, "folder with a manifest, or the manifest itself", metavar="DIR")
    val_split: float | None = option(
        None,
        "share of the validation set",
        metavar="SHARE",
        unset=f"{PREVIOUS}0.1, or 0 with --num_folds",
    )
    num_folds: int | None = option(
        None,
        "folds that the other images are divided into",
        metavar="K",
        unset=f"{PREVIOUS}no folds",
    )
    group_by: str | None = option(
        None,
        "images to keep together: near_duplicates, manifest (the groups in it), folder:N "
        "(the N outermost folders) or a column of --features",
        metavar="RULE",
        unset=f"{PREVIOUS}manifest if it has groups, otherwise near_duplicates",
    )
    label_by: str | None = option(
        None,
        "label to balance by: manifest, folder:N or a column of --features",
        metavar="RULE",
        unset=f"{PREVIOUS}manifest",
    )
    features: str | None = option(None, "CSV file with the columns id, filepath and others", metavar="FILE")
    labels: str | None = option(None, "CSV file with id and a label, or one-hot columns", metavar="FILE")
    seed: int | None = option(
        None,
        "another seed gives another split",
        metavar="N",
        unset=f"{PREVIOUS}0",
        at_least=0,
    )
    num_workers: str = option("auto", "processes; auto: one per usable core", metavar="N")


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Draw synthetic images to try the trainer with."""

    output_dir: str = option(
        "./data/demo",
        "new or empty folder, or one that the same command has started to fill",
        metavar="DIR",
        writes=True,
    )
    count: int = option(64, "number of images", metavar="N", at_least=1)
    target_size: int = option(256, "side of the images", metavar="PX", at_least=8)
    seed: int = option(0, "another seed draws other images", metavar="N", at_least=0)
    format: str = option("png", "file format; jpeg: quality 95, 4:4:4", choices=("png", "jpeg"))
    num_workers: str = option(
        "auto", "drawing processes; auto: usable cores minus 2, between 1 and 12", metavar="N"
    )


PrepareConfig = (
    PreprocessConfig
    | ValidateConfig
    | ShardConfig
    | MergeConfig
    | IndexConfig
    | AnalyzeConfig
    | SplitConfig
    | DemoConfig
)
CONFIG_OF: dict[str, type[PrepareConfig]] = {
    "preprocess": PreprocessConfig,
    "validate": ValidateConfig,
    "shard": ShardConfig,
    "merge": MergeConfig,
    "index": IndexConfig,
    "analyze": AnalyzeConfig,
    "split": SplitConfig,
    "demo": DemoConfig,
}
DESCRIPTION = "Prepare a training set from raw image files, in eight modes. Each mode has its own flags."


def parse_prepare_flags(argv: list[str]) -> PrepareConfig:
    """The options of the mode that --mode names; raises UsageError for every mistake."""
    first = OneLineParser(allow_abbrev=False, add_help=False)
    first.add_argument("--mode", choices=tuple(CONFIG_OF), action="append")
    parsed, words = first.parse_known_args(argv)
    if len(set(parsed.mode or [])) > 1:
        raise UsageError(f"--mode {' and --mode '.join(parsed.mode)}: give one mode for each command")
    mode = parsed.mode[0] if parsed.mode else None
    given = {word.split("=")[0] for word in words if word.startswith("--")}
    _refuse_unknown_flags(mode, given)
    if mode is None:
        if not {"-h", "--help", "--help_all"} & set(words):
            raise UsageError(f"--mode is missing: give one of {', '.join(CONFIG_OF)} (--help describes them)")
        _print_help(everything="--help_all" in words)
        sys.exit(0)
    if "--undo_quarantine" in given:  # its own message about a missing folder names the folder in the record
        words = ["--input_dir", os.devnull, *words]
    source = "input" if mode == "index" else "input_dir"
    has_no_input = "--remove" in given and f"--{source}" not in given
    config = _parse_mode(mode, [f"--{source}", os.devnull, *words] if has_no_input else words)
    if has_no_input and isinstance(config, IndexConfig):
        config = replace(config, input="")
    elif has_no_input and isinstance(config, ShardConfig):
        config = replace(config, input_dir="")
    _check_together(config, given)
    return config


def _parse_mode(mode: str, words: list[str]) -> PrepareConfig:
    section = CONFIG_OF[mode]
    try:
        return parse_section(section, f"prepare_data.py --mode {mode}", section.__doc__ or "", "", words)
    except UserError as error:  # a value outside its limits
        raise UsageError(str(error)) from None


def _print_help(*, everything: bool) -> None:
    """The modes, or `everything`: the flags of each mode."""
    console.info(f"usage: prepare_data.py --mode MODE [flags]\n\n{DESCRIPTION}\n")
    for mode, section in CONFIG_OF.items():
        if everything:
            with suppress(SystemExit):  # argparse exits after it prints the help
                _parse_mode(mode, ["--help"])
            console.info("")
        else:
            console.info(f"  {mode:<12}{section.__doc__}")
    if not everything:
        console.info(
            "\nprepare_data.py --mode MODE --help shows the flags of a mode, --help_all those of all modes."
        )


def _refuse_unknown_flags(mode: str | None, given: set[str]) -> None:
    """Raise UsageError for a flag that no mode has, or that another mode has."""
    for flag in sorted(given - {"--help", "--help_all"}):
        if not (owners := _owners(flag)):
            raise UsageError(_unknown_flag(mode, flag))
        if mode is not None and mode not in owners:
            raise UsageError(
                f"{flag} belongs to --mode {' and '.join(owners)}, not to --mode {mode}: leave it out"
            )


def _unknown_flag(mode: str | None, flag: str) -> str:
    """The message about a flag that no mode has; the most similar one may belong to another mode."""
    known = sorted({"--mode"}.union(*map(_flags_of, CONFIG_OF)))
    close = most_similar(flag, known)
    owners = _owners(close) if close else []
    if mode is not None and owners and mode not in owners:
        return f"unknown flag {flag}: did you mean {close}? It belongs to --mode {' and '.join(owners)}"
    return unknown_flag(flag, known)


def _owners(flag: str) -> list[str]:
    """The modes that have a flag."""
    return [mode for mode in CONFIG_OF if flag in _flags_of(mode)]


def _flags_of(mode: str) -> set[str]:
    """All flags of a mode, with the negative forms of those without a value."""
    options = fields(CONFIG_OF[mode])
    return {f"--{item.name}" for item in options} | {
        f"--no-{item.name}" for item in options if item.type is bool
    }


def _check_together(config: PrepareConfig, given: set[str]) -> None:
    if isinstance(config, RulesConfig):
        _check_rules(config)
    if isinstance(config, ReadingConfig):
        _check_limits(config)
    if isinstance(config, PreprocessConfig):
        if "--quality" in given and config.format == "png":
            raise UsageError(
                f"--quality {config.quality} has no effect with --format png, which is lossless: leave it out"
            )
        if len(set(config.target_size)) < len(config.target_size):
            sizes = " ".join(map(str, config.target_size))
            raise UsageError(f"--target_size {sizes} names one size twice: give each size once")
    if (
        isinstance(config, PreprocessConfig | ShardConfig | ValidateConfig | AnalyzeConfig)
        and config.part is not None
    ):
        _check_part(config)
    if isinstance(config, MergeConfig) and (config.output_dir is None) == (config.output_file is None):
        raise UsageError(
            "--mode merge needs either --output_dir, the folder of the parts of shard or preprocess, or "
            "--output_file, the report whose parts validate or analyze has made"
        )
    if isinstance(config, ShardConfig | IndexConfig) and not 0 <= config.val_split < 1:
        raise UsageError(f"--val_split {config.val_split} is not a share: give 0 to below 1, such as 0.05")
    if isinstance(config, ShardConfig) and config.drop and config.parent is None:
        raise UsageError("--drop has no effect without --parent: leave it out")
    if isinstance(config, ShardConfig | IndexConfig) and config.remove and config.parent is None:
        raise UsageError("--remove has no effect without --parent: add it")
    if isinstance(config, ShardConfig) and config.drop and not config.input_dir:
        raise UsageError("--drop would leave out all images without --input_dir: add it, or leave --drop out")
    if isinstance(config, ValidateConfig):
        if config.undo_quarantine and config.part:
            raise UsageError(f"--undo_quarantine is no work of a part: leave --part {config.part} out")
        if config.undo_quarantine and not config.quarantine_dir:
            raise UsageError("--undo_quarantine needs --quarantine_dir: give the folder to empty")
        if config.quarantine_dir and config.limit is not None and not config.undo_quarantine:
            raise UsageError(
                f"--quarantine_dir with --limit {config.limit} would leave the other files unchecked: "
                "leave one of the two out"
            )


def _check_part(config: PreprocessConfig | ShardConfig | ValidateConfig | AnalyzeConfig) -> None:
    number, _, count = str(config.part).partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count) <= MAX_PARTS):
        raise UsageError(
            f"--part {config.part} is no part: give 0/N to N-1/N, for example 0/16 to 15/16; N is at most "
            f"{MAX_PARTS}"
        )
    if config.limit is not None:
        raise UsageError(f"--limit {config.limit} has no meaning with --part: leave one of the two out")
    if config.engine == "ray":
        raise UsageError("--engine ray makes its own parts: leave --part out")


def _check_limits(config: ReadingConfig) -> None:
    for name in ("time_limit", "memory_gib"):
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name} {value} is not a limit: give a number above 0")


def _check_rules(config: RulesConfig) -> None:
    if config.engine == "ray" and ((spec := find_spec("ray")) is None or spec.origin is None):
        raise UsageError("--engine ray needs the package ray: pip install ray, or leave the flag out")
    if config.ray_address is not None and config.engine != "ray":
        raise UsageError(f"--ray_address {config.ray_address} has no effect without --engine ray: add it")
    if 0 < config.max_aspect < 1:
        raise UsageError(f"--max_aspect {config.max_aspect} is not a ratio: give 1 or more, or 0 for any")
