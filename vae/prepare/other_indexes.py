"""Files beside the shards that other programs need to read them: NVIDIA Energon and NVIDIA DALI.

They are functions of the shards alone, so they have the same bytes on every machine. WebDataset needs none.

Energon reads `.nv-meta/` and, for each x.tar, x.tar.idx: the position of each sample as little-endian uint64,
and the end of the last one. Its index.sqlite, for datasets that are joined by key, has other bytes with every
version of SQLite, so `energon prepare` has to add it. DALI reads x.idx: text, as its tool wds2idx writes it.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vae.images.formats import EXTENSIONS_OF
from vae.shards.index import Shard
from vae.system.files import write_json

ENERGON_FOLDER = ".nv-meta"
SUFFIXES = (".tar.idx", ".idx")  # of the index of Energon and of DALI


class Entry(NamedTuple):
    """A file within a tar file."""

    name: str
    header: int  # position of its header, bytes
    offset: int  # of its first byte
    size: int  # bytes


Sample = tuple[Entry, Entry]  # an image and its JSON file


def indexes(samples: Sequence[Sample], end: int) -> dict[str, bytes]:
    """The index files of a tar file, by suffix; `end` is the position after its last sample."""
    starts = [image.header for image, _ in samples]
    lines = [f"v1.2 {len(samples)}", *(" ".join(map(_dali_entry, sample)) for sample in samples)]
    energon = struct.pack(f"<{len(starts) + 1}Q", *starts, end)
    return dict(zip(SUFFIXES, (energon, ("\n".join(lines) + "\n").encode()), strict=True))


def _dali_entry(entry: Entry) -> str:
    return f"{entry.name.partition('.')[2]} {entry.offset} {entry.size} {entry.name}"


def write_energon_metadata(root: Path, training: Sequence[Shard], validation: Sequence[Shard]) -> None:
    """Write Energon's description of a folder: the samples of each shard, its subset, and the fields."""
    counts = {shard.name: shard.samples for shard in [*training, *validation]}
    subsets = {"train": training, "val": validation, "test": ()}
    splits = {subset: [shard.name for shard in shards] for subset, shards in subsets.items()}
    extensions = ",".join(sorted(names[0].lstrip(".") for names in EXTENSIONS_OF.values()))
    sample_type = {"__module__": "megatron.energon", "__class__": "ImageSample"}
    contents = {  # every JSON text is YAML
        ".info.json": {"energon_version": None, "shard_counts": counts},
        "split.yaml": {"split_parts": splits, "exclude": []},
        "dataset.yaml": {"sample_type": sample_type, "field_map": {"image": extensions}},
    }
    for name, content in contents.items():
        write_json(root / ENERGON_FOLDER / name, content, indent=1)
