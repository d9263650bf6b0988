#!/usr/bin/env python3
"""Make a training set out of raw images: clean it, check it, look at it, split it; or draw a demo set."""

import argparse
import sys

from vae.config.errors import EXIT_DATA, UsageError
from vae.config.prepare_flags import read_arguments
from vae.script import run_script


def _rules(arguments: argparse.Namespace):
    from vae.prepare.check_file import Rules

    names = ("max_pixels", "background", "first_frame", "min_size", "max_aspect")
    return Rules(**{name: getattr(arguments, name) for name in names})


def _common(arguments: argparse.Namespace) -> dict:
    names = ("input_dir", "limit", "num_workers", "time_limit", "memory_gib")
    return {name: getattr(arguments, name) for name in names}


def run_preprocess(arguments: argparse.Namespace) -> int:
    """Raw images in, a training set out."""
    from vae.prepare.preprocess.convert import Recipe
    from vae.prepare.preprocess.run import PreprocessOptions, preprocess, summarize

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
    from vae.prepare.validate.quarantine import undo
    from vae.prepare.validate.run import ValidateOptions, validate

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

    from vae.prepare.analyze.run import AnalyzeOptions, analyze, summary_lines

    options = AnalyzeOptions(output_file=arguments.output_file, rules=_rules(arguments), **_common(arguments))
    print(*summary_lines(analyze(options), Path(arguments.output_file)), sep="\n")
    return 0


def run_split(arguments: argparse.Namespace) -> int:
    """Which images train and which validate."""
    from vae.prepare.pool import count_workers
    from vae.prepare.split.run import split_manifest

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
    """Draw images."""
    from vae.data.workers import resolve_num_workers
    from vae.prepare.demo.run import DemoSettings, write_demo

    settings = DemoSettings(arguments.target_size, arguments.seed, arguments.format)
    workers = resolve_num_workers(arguments.num_workers)
    drawn = write_demo(arguments.output_dir, arguments.count, settings, workers)
    print(f"{arguments.output_dir}: {arguments.count} images, {drawn} of them drawn now")
    return 0


MODES = {
    "preprocess": run_preprocess,
    "validate": run_validate,
    "analyze": run_analyze,
    "split": run_split,
    "demo": run_demo,
}


def _say_what_is_missing() -> None:
    from vae.data.strict_jpeg import has_simplejpeg
    from vae.prepare.preprocess.resize import engine

    if not has_simplejpeg():
        print(
            "simplejpeg is not installed: damage inside JPEGs goes unnoticed, and reading takes 3x the time"
        )
    if engine() == "Pillow":
        print("pyvips is not installed: Pillow resizes instead, with the same quality, in 7x the time")


def main(argv: list[str]) -> int:
    """Run one mode; returns the exit code."""
    arguments = read_arguments(__doc__, argv)
    return MODES[arguments.mode](arguments)


if __name__ == "__main__":
    goes_on = {"preprocess", "demo"} & set(sys.argv)  # the others write at their end only
    run_script(
        "prepare_data.py", main, "stopped: the same command goes on from here" if goes_on else "stopped"
    )
