"""A block whose process ends is repeated image by image, so an image that ends it costs itself alone."""

import os
from dataclasses import dataclass

import pytest

from tests.harness.image_kinds import detailed, encoded
from tests.harness.tars import write_tar
from vae.config.prepare_flags import ShardConfig
from vae.prepare.blocks import Block, Item, given
from vae.prepare.check import Check
from vae.prepare.rows import RowFolder
from vae.prepare.source import Source, open_source
from vae.prepare.table import Table

IMAGES = {f"{number}.png": encoded(detailed(number), "PNG") for number in range(6)}


class Deadly(Check):
    """A check whose process ends at two of the images."""

    def row(self, block, number, item):
        if item.name in ("1.png", "4.png"):
            os._exit(3)
        return super().row(block, number, item)


@dataclass(frozen=True, kw_only=True)
class DeadlyBlock(Block):
    """A block that cannot be read to its end without ending the process."""

    def items(self, facts=None):
        yield Item("0.png", given(IMAGES["0.png"]))
        os._exit(3)


def checked(source, check, folder):
    """The table of a source after its check in two processes, and the number of blocks that are done."""
    with RowFolder(folder, "", {}).claimed() as rows:
        rows.run(source, check)
        return Table(rows, source), sum(map(rows.has, source.blocks))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_image_that_ends_its_process_costs_itself_alone(kind, tmp_path):
    if kind == "tar":
        path = write_tar(tmp_path / "a.tar", list(IMAGES.items()))
    else:
        path = tmp_path / "raw"
        path.mkdir()
        for name, data in IMAGES.items():
            (path / name).write_bytes(data)
    config = ShardConfig(input_dir=str(path), output_dir="", num_workers="2")
    table, done = checked(open_source(config), Deadly(config), tmp_path / "rows")
    reasons = dict(table.all("SELECT name, reason FROM images ORDER BY n"))
    assert done == 1
    assert list(reasons) == list(IMAGES)
    assert {name for name, reason in reasons.items() if reason == "crashed"} == {"1.png", "4.png"}
    assert table.accepted == 4


def test_block_whose_reading_ends_the_process_is_broken_and_read_again(tmp_path):
    config = ShardConfig(input_dir="", output_dir="", num_workers="2")
    source = Source("", [DeadlyBlock(id="one", file=tmp_path)], "tar")
    for _ in range(2):
        table, done = checked(source, Check(config), tmp_path / "rows")
        assert [reason for _, reason, _ in table.broken_blocks()] == ["crashed"]
        assert (table.count(), done) == (0, 0)
