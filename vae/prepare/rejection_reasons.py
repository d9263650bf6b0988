"""Reasons for rejecting a file: the remedy for each, and the lines about them in a terminal summary."""

import time

from vae.images.folder import Skips
from vae.prepare.table import Table
from vae.system import console
from vae.system.console import counted, printable

REMEDIES = {
    "animated": "save one frame, or use --first_frame",
    "aspect": "crop it, or raise --max_aspect",
    "broken_link": "fix the link",
    "changed_since_manifest": "copy it again, or write the manifest again",
    "color_not_supported": "save it as sRGB",
    "crashed": "the decoder crashed: convert it, or leave it out",
    "damaged": "copy it again from its source",
    "bad_name": "rename it",
    "excluded": "--exclude lists it",
    "empty": "copy it again from its source",
    "float_pixels": "save it as 16-bit, or with values from 0 to 1",
    "format_not_supported": "convert it to PNG or JPEG",
    "high_dynamic_range": "convert it to sRGB with a program for HDR",
    "hung": "convert it, or raise --time_limit",
    "jpeg_coding_not_supported": "convert it to 8-bit JPEG or PNG",
    "missing": "copy it again, or write the manifest again",
    "near_duplicate": "it looks like a larger image",
    "name_too_long": "shorten it",
    "no_permission": "fix its permissions",
    "not_an_image": "leave it out",
    "out_of_memory": "raise --memory_gib, or lower --max_pixels",
    "plugin_missing": "install the named package",
    "too_large": "make it smaller",
    "too_large_for_format": "use --format png, or lower --max_aspect",
    "too_many_pixels": "make it smaller, or raise --max_pixels",
    "too_small": "lower --min_size or --target_size",
    "transparent": "leave it out",
    "truncated": "copy it again from its source",
    "unreadable": "fix the disk, link or permission; on Windows, allow long paths",
    "where": "its metadata do not fulfil --where",
}
EXAMPLES = 3  # files named per reason
BROKEN_SHOWN = 20
GROUPS_SHOWN, NAMES_SHOWN = 3, 4
NOT_REJECTED = ("exact_duplicate", "near_duplicate", "where", "excluded")  # good images
# Codes of entries that no verb reads: the user may have expected it to.
SKIPPED = {
    "archive": "give it as --input_dir, or unpack it",
    "duplicate_key": "give each sample a key of its own",
    "no_image": "a sample without an image: see --image_key",
    "not_a_file": "store the file itself in the tar file, without holes",
    "raw_file": "a camera's raw file: develop it to PNG or JPEG first",
    "several_images": "the first image of each sample is used: choose with --image_key",
    "unreadable_folder": "fix its permissions; on Windows, allow long paths",
    "system": "of another program",
}


def remedy(reason: str) -> str:
    """Return what a user can do about files with this reason."""
    return REMEDIES.get(reason, "copy it again or leave it out")


def reason_lines(table: Table) -> list[str]:
    """For each reason: a line with its count and remedy, and a line for each of a few example files."""
    lines = []
    for reason, count in table.counts():
        verb = "left out" if reason in NOT_REJECTED else "rejected"
        if reason == "exact_duplicate":
            continue  # the first line of a summary has them
        lines.append(f"  {verb} {count:>7}  {reason}: {remedy(reason)}")
        if verb == "rejected":
            for name, detail in table.examples(reason, EXAMPLES):
                lines.append(f"                    {printable(name)}: {printable(detail)}")
    return lines


def skip_lines(skips: Skips) -> list[str]:
    """For each kind of skipped entry: a line with its count and an example."""
    order = sorted(skips.counts.items(), key=lambda item: (-item[1], item[0]))
    return [
        f"  skipped  {count:>7}  {code}: {printable(skips.examples[code][0])}"
        + (f" ({SKIPPED[code]})" if code in SKIPPED else "")
        for code, count in order
    ]


def count_rejected(table: Table) -> int:
    """Number of images that cannot be used, or that the rules for images refuse."""
    return sum(count for reason, count in table.counts() if reason not in NOT_REJECTED)


def broken_lines(table: Table) -> list[str]:
    """A line for each file of many images that cannot be read to its end."""
    return [
        f"  broken  {printable(str(table.blocks[number].file))}: {reason}: {printable(detail)}"
        for number, reason, detail in table.broken_blocks()[:BROKEN_SHOWN]
    ]


def print_summary(table: Table, made: str, began: float, *last: str) -> None:
    """Print what was made since `began`, a monotonic time, what was left out and why, and what to do next."""
    copies = counted(table.count("reason = 'exact_duplicate'"), "exact duplicate")
    seconds = time.monotonic() - began
    first = f"{made}, {count_rejected(table)} rejected, {copies} ({seconds:.1f} s)"
    lines = [*reason_lines(table), *broken_lines(table), *skip_lines(table.skips)]
    console.info("\n".join([first, *lines, *last]))


def group_lines(groups: dict[str, list[str]], where: str) -> list[str]:
    """The number of near duplicates, `where` all are listed, and a few groups."""
    images = counted(sum(map(len, groups.values())), "image")
    lines = [
        f"  near duplicates: {images} in {counted(len(groups), 'group')}{f', {where}' if groups else ''}"
    ]
    for group, names in list(groups.items())[:GROUPS_SHOWN]:
        more = ", ..." if len(names) > NAMES_SHOWN else ""
        lines.append(f"    {group}: {printable(', '.join(sorted(names)[:NAMES_SHOWN]))}{more}")
    return lines
