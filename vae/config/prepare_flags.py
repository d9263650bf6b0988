"""The options of prepare_data.py, each declared once: one dataclass per mode."""

import sys
from contextlib import suppress
from dataclasses import MISSING, dataclass
from typing import Any

from vae.config.declare import MAX_PIXELS, background_option, option
from vae.config.flags import OneLineParser, parse_section
from vae.system import console
from vae.system.errors import EXIT_DATA, UsageError, UserError

MAX_PARTS = 10_000
_IMAGES = (
    "folder of image files, of any depth; or tar or Parquet files with images: a folder, a pattern, a .txt "
    "list, an address such as s3://bucket/photos/, or hf://datasets/OWNER/NAME[/SPLIT] of the Hugging Face "
    "hub"
)


def _part_option() -> Any:
    """--part, of the modes whose work is divided."""
    return option(
        None,
        "do this part of the work, 0/N to N-1/N; the same command without --part completes it",
        metavar="I/N",
    )


def _output_dir_option(default: Any = MISSING) -> Any:
    return option(
        default,
        "new or empty folder, or one that the same command has started to fill",
        metavar="DIR",
        writes=True,
    )


def _join_option() -> Any:
    return option(
        None,
        "Parquet, CSV or JSON lines files with more metadata: a file, a folder, a pattern or an address; "
        "more than one are joined in this order, by --join_on or else by a column that those before have",
        metavar="FILES",
    )


@dataclass(frozen=True, kw_only=True)
class RulesConfig:
    """Options of every mode that accepts or rejects images: its rules, and its processes."""

    min_size: int = option(1, "reject images whose shorter side is below this", metavar="PX", at_least=1)
    max_aspect: float = option(
        0.0, "reject images whose longer side exceeds X times the shorter side; 0: any", at_least=0
    )
    max_pixels: int = option(MAX_PIXELS, "reject images with more pixels, before decoding them", at_least=1)
    first_frame: bool = option(
        False, "use the first frame of animations and multi-page files instead of rejecting them"
    )
    num_workers: str = option("auto", "processes; auto: one per usable core", auto=True, at_least=0)


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """Options of every mode that writes a training set from chosen images."""

    output_dir: str = _output_dir_option()
    part: str | None = _part_option()
    where: str | None = option(
        None,
        "keep only images for which this SQL expression is true; columns are width, height, bytes, format, "
        "name and the metadata, as in \"aesthetic >= 5 and lang = 'en'\"",
        metavar="EXPRESSION",
        unset="all",
    )
    join: tuple[str, ...] | None = _join_option()
    join_on: str = option(
        "key", "column of --join that images have too: key, url, sha256, name or another", metavar="NAME"
    )
    exclude: str | None = option(
        None,
        "text file with an image on each line to leave out: the SHA-256 or key of its file, or its name",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class ReadingConfig(RulesConfig):
    """Options of every mode that decodes images."""

    input_dir: str = option(MISSING, _IMAGES, metavar="DIR")
    image_column: str | None = option(
        None,
        "column with the images, of Parquet files that have several",
        metavar="NAME",
        unset="the only one",
    )
    background: str = background_option()
    limit: int | None = option(None, "process only the first N files by name", at_least=1)
    time_limit: float = option(60.0, "time limit for one image", metavar="SECONDS", at_least=0.001)
    memory_gib: float | None = option(
        None,
        "memory limit for one image; not on Windows",
        metavar="GIB",
        at_least=0.001,
        unset="16 bytes per pixel of --max_pixels, plus 1 GiB",
    )


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(SelectConfig, ReadingConfig):
    """Convert raw image files to a training set with a manifest."""

    target_size: int = option(1024, "side of the images, as --resize_mode says", metavar="PX", at_least=8)
    resize_mode: str = option(
        "cover",
        "cover: scale the shorter side; longest: scale the longer side; contain: as longest, but never "
        "enlarge; crop: cover, then crop the centre square; pad: longest, then pad to a square with "
        "--background; stretch: scale both sides to a square",
        choices=("cover", "contain", "crop", "pad", "stretch", "longest"),
    )
    format: str = option("jpeg", "format of the output files", choices=("jpeg", "png", "webp"))
    quality: int = option(95, "quality of jpeg and webp", metavar="1-100", at_least=1, at_most=100)
    keep_alpha: bool = option(
        False, "keep alpha, for train_vae.py --image_channels 4; --background is then that of the rules only"
    )
    upscale: bool = option(False, "enlarge images that are too small instead of rejecting them")
    drop_duplicates: bool = option(
        False,
        "of each group of near duplicates that --mode analyze lists, keep only the image with most pixels",
    )


@dataclass(frozen=True, kw_only=True)
class ValidateConfig(ReadingConfig):
    """Decode every image as the trainer does, and report those that cannot be used."""

    output_file: str = option("validation_report.json", "report as JSON", metavar="FILE", writes=True)
    overwrite: bool = option(False, "replace the report if it exists")
    rows_dir: str | None = option(
        None,
        "folder that keeps the result of each image, so that a killed command continues; parts share it",
        metavar="DIR",
        writes=True,
        unset="a temporary folder",
    )
    part: str | None = _part_option()
    strict: bool = option(False, f"exit with {EXIT_DATA} if any file was rejected")
    quarantine_dir: str | None = option(
        None, "move rejected files to this folder", metavar="DIR", writes=True
    )


@dataclass(frozen=True, kw_only=True)
class ShardConfig(SelectConfig, ReadingConfig):
    """Pack images, unchanged, into a dataset of tar shards for training."""

    shard_mb: int = option(1000, "size of a shard in megabytes", metavar="MB", at_least=1)
    val_split: float = option(
        0.05,
        "share of the images for a validation dataset; not used if a manifest defines the split",
        metavar="SHARE",
        at_least=0,
        at_most=0.99,
    )
    near_duplicates: bool = option(
        True, "keep images that look alike in one subset, and refuse a manifest whose split separates them"
    )


@dataclass(frozen=True, kw_only=True)
class IndexConfig(SelectConfig, RulesConfig):
    """Index tar files that others wrote (WebDataset, img2dataset), where they are, for training."""

    input: str = option(
        MISSING,
        "folder or address/ with tar files, a pattern such as 's3://bucket/{00000..00099}.tar', or a .txt "
        "file with a path or address in each line; or the dataset.json of this mode, whose tar files are "
        "chosen from again without reading them",
        metavar="TARS",
    )
    image_key: str | None = option(
        None,
        "extension of the images, such as jpg or rgb.png, if samples have several",
        metavar="EXTENSION",
        unset="the first image of each sample",
    )
    val_split: float = option(
        0.0,
        "share of the images for a validation dataset, by the hash of their bytes",
        metavar="SHARE",
        at_least=0,
        at_most=0.99,
    )
    skip_broken_tars: bool = option(
        False, "leave out tar files that are broken or missing, instead of ending with an error"
    )


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig(ReadingConfig):
    """Measure a set of images; write the statistics as JSON, histograms and a list of near duplicates."""

    output_dir: str = option(
        "./dataset_stats",
        "new or empty folder for stats.json, histograms.png and near_duplicates.csv",
        metavar="DIR",
        writes=True,
    )
    part: str | None = _part_option()


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Assign the images of a manifest to training and validation."""

    input_dir: str = option(MISSING, "folder with a manifest, or the manifest itself", metavar="DIR")
    val_split: float | None = option(
        None,
        "share of the validation set",
        metavar="SHARE",
        at_least=0,
        at_most=0.9,
        unset="0.1, or 0 with --num_folds",
    )
    num_folds: int = option(
        0, "folds that the other images are divided into; 0: none", metavar="K", at_least=0, at_most=1000
    )
    group_by: str | None = option(
        None,
        "images to keep together: near_duplicates, manifest (the groups in it), folder:N "
        "(the N outermost folders) or a column of --join",
        metavar="RULE",
        unset="manifest if it has groups, otherwise near_duplicates",
    )
    label_by: tuple[str, ...] = option(
        ("manifest",),
        "label to balance by: manifest, folder:N or a column of --join; of several columns, the name of "
        "the one that is 1",
        metavar="RULE",
    )
    join: tuple[str, ...] | None = _join_option()
    join_on: str = option(
        "path",
        "column of --join with the path of each image below the prepared or the original folder",
        metavar="NAME",
    )
    seed: int = option(0, "another seed gives another split", at_least=0)


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Draw synthetic images to try the trainer with."""

    output_dir: str = _output_dir_option("./data/demo")
    count: int = option(64, "number of images", at_least=1)
    target_size: int = option(256, "side of the images", metavar="PX", at_least=8)
    seed: int = option(0, "another seed draws other images", at_least=0)
    num_workers: str = option(
        "auto", "drawing processes; auto: usable cores minus 2, between 1 and 12", auto=True, at_least=0
    )


PrepareConfig = (
    PreprocessConfig | ValidateConfig | ShardConfig | IndexConfig | AnalyzeConfig | SplitConfig | DemoConfig
)
CONFIG_OF: dict[str, type[PrepareConfig]] = {
    "preprocess": PreprocessConfig,
    "validate": ValidateConfig,
    "shard": ShardConfig,
    "index": IndexConfig,
    "analyze": AnalyzeConfig,
    "split": SplitConfig,
    "demo": DemoConfig,
}
DESCRIPTION = "Prepare a training set from raw images, in seven modes. Each mode has its own flags."


def parse_prepare_flags(argv: list[str]) -> PrepareConfig:
    """The options of the mode that --mode names; raises UsageError for every mistake."""
    first = OneLineParser(allow_abbrev=False, add_help=False)
    first.add_argument("--mode", choices=tuple(CONFIG_OF))
    parsed, words = first.parse_known_args(argv)
    if parsed.mode is None:
        if not {"-h", "--help", "--help_all"} & set(words):
            raise UsageError(f"--mode is missing: give one of {', '.join(CONFIG_OF)} (--help describes them)")
        _print_help(everything="--help_all" in words)
        sys.exit(0)
    config = _parse_mode(parsed.mode, words)
    _check_together(config, given={word.split("=")[0] for word in words})
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


def _check_together(config: PrepareConfig, given: set[str]) -> None:
    if isinstance(config, RulesConfig) and 0 < config.max_aspect < 1:
        raise UsageError(f"--max_aspect {config.max_aspect} is not a ratio: give 1 or more, or 0 for any")
    if isinstance(config, PreprocessConfig) and "--quality" in given and config.format == "png":
        raise UsageError(f"--quality {config.quality} has no effect with --format png: leave it out")
    if isinstance(config, PreprocessConfig) and config.keep_alpha and config.format == "jpeg":
        raise UsageError("--keep_alpha needs --format png or --format webp: jpeg files have no alpha")
    if part := getattr(config, "part", None):
        _check_part(part, getattr(config, "limit", None))
    if isinstance(config, SelectConfig | SplitConfig) and "--join_on" in given and not config.join:
        raise UsageError(f"--join_on {config.join_on} has no effect without --join: add it, or leave it out")
    if isinstance(config, ValidateConfig):
        _check_validate(config)


def _check_validate(config: ValidateConfig) -> None:
    if config.quarantine_dir and config.limit is not None:
        raise UsageError(
            f"--quarantine_dir with --limit {config.limit} leaves files unchecked: leave one out"
        )
    if config.part and not config.rows_dir:
        raise UsageError(f"--part {config.part} needs --rows_dir, for the results of all parts: add it")


def _check_part(part: str, limit: int | None) -> None:
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count) <= MAX_PARTS):
        raise UsageError(
            f"--part {part} is no part: give 0/N to N-1/N, such as 15/16, with N up to {MAX_PARTS}"
        )
    if limit is not None:
        raise UsageError(f"--limit {limit} has no meaning with --part: leave one of the two out")
