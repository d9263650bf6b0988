"""Reasons for rejecting a file: the remedy for each, and the lines about them in a terminal summary."""

from collections.abc import Iterator

from vae.prepare.ledger import REJECTED, Ledger, Skips
from vae.system.console import printable

REMEDIES = {
    "animated": "save one frame, or use --first_frame",
    "aspect": "crop it, or raise --max_aspect",
    "broken_link": "fix the link",
    "changed_since_manifest": "copy it again, or write the manifest again",
    "changed_while_reading": "wait until it is written completely, then run again",
    "crashed": "the decoder crashed: convert it, or leave it out",
    "damaged": "copy it again from its source",
    "duplicate_image": "leave it out: the tar file has these bytes twice",
    "duplicate_key": "give each sample a key of its own",
    "empty": "copy it again from its source",
    "float_pixels": "save it as 16-bit",
    "format": "its format is not in --formats",
    "format_not_supported": "convert it to PNG or JPEG",
    "hung": "convert it, or raise --time_limit",
    "jpeg_coding_not_supported": "convert it to 8-bit JPEG or PNG",
    "link": "store the file itself in the tar file",
    "looks_like_both": "leave it out: it looks like training and like validation images of --parent",
    "missing": "copy it again, or write the manifest again",
    "name_too_long": "shorten it",
    "no_image": "a sample without an image: see --image_key",
    "no_permission": "fix its permissions",
    "not_an_image": "leave it out",
    "out_of_memory": "raise --memory_gib, or lower --max_pixels",
    "plugin_missing": "install the named package",
    "several_images": "the first image of each sample is used: choose with --image_key",
    "sparse": "store the file without holes",
    "special": "leave it out",
    "text_bomb": "save it without its comments",
    "too_large": "make it smaller",
    "too_large_for_format": "use --format png, or lower --max_aspect",
    "too_many_pixels": "make it smaller, or raise --max_pixels",
    "too_many_scans": "save it again with few scans",
    "too_small": "use a smaller size, or --upscale",
    "transparent": "leave it out",
    "truncated": "copy it again from its source",
    "unreadable": "fix the disk, link or permission",
    "where": "its metadata do not fulfil --where",
}
# Reasons that may no longer apply in the next run although the file is the same.
TRANSIENT = frozenset(
    ("crashed", "hung", "out_of_memory", "unreadable", "no_permission", "broken_link",
     "changed_while_reading", "looks_like_both", "plugin_missing")
)  # fmt: skip
EXAMPLES = 3  # files named per reason


def remedy(reason: str) -> str:
    """What to do about files with this reason."""
    return REMEDIES.get(reason, "copy it again or leave it out")


def rejection_lines(ledger: Ledger) -> Iterator[str]:
    """For each reason: a line with its count and remedy, and a line for each of a few example files."""
    for reason, count in ledger.counts(REJECTED):
        yield f"  rejected {count:>7}  {reason}: {remedy(reason)}"
        for result in ledger.rejected_examples(reason)[:EXAMPLES]:
            yield f"                    {printable(result.name)}: {printable(result.detail)}"


def skip_lines(skips: Skips) -> Iterator[str]:
    """For each kind of skipped entry: a line with its count and an example."""
    for code, count in skips.counts.most_common():
        yield f"  skipped  {count:>7}  {code}: {printable(skips.examples[code][0])}"


def duplicates_text(count: int) -> str:
    """The number of exact duplicates in words."""
    return f"{count} exact duplicate{'s' * (count != 1)}"
