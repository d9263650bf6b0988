"""A new version of a dataset shares the unchanged shards of the one before it."""

import json

import pytest

from tests.harness.image_kinds import detailed, encoded
from tests.harness.shards import pack
from tests.prepare.test_shard import members
from vae.config.prepare_flags import ValidateConfig
from vae.prepare.shard.verify import run_verify
from vae.shards.index import read_dataset
from vae.system.errors import DataError, UserError

IMAGES = 30


def add(folder, numbers):
    for number in numbers:
        (folder / f"{number:02}.png").write_bytes(encoded(detailed(seed=number), "PNG"))


def write(root, name, parent=None, **flags):
    """Pack raw/ in shards of at most 40 kB: about 4 images each."""
    before = str(root / parent / "dataset.json") if parent else None
    flags = {"val_split": 0.2, "parent": before, **flags}
    return read_dataset(pack(root / "raw", root / name, shard_bytes=40_000, **flags))


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """A folder with two versions: the second has two more images, and lacks one."""
    root = tmp_path_factory.mktemp("versions")
    (root / "raw").mkdir()
    add(root / "raw", range(IMAGES))
    (root / "raw" / "preprocess_settings.json").write_text('{"target_size": [64], "format": "png"}')
    first = write(root, "one")
    add(root / "raw", (100, 101))
    (root / "raw" / "07.png").unlink()
    return root, first, write(root, "two", "one")


def names(folder):
    return {path.name for path in folder.glob("*.tar")}


def test_unchanged_shards_are_the_same_files(versions):
    root, _, _ = versions
    both = names(root / "one") & names(root / "two")
    assert len(both) >= 3
    for name in both:
        for suffix in (".tar", ".npy", ".idx", ".tar.idx"):
            one, two = (root / part / name.replace(".tar", suffix) for part in ("one", "two"))
            assert one.samefile(two)
    assert names(root / "two") - both


def test_new_version_has_all_images_once_and_is_valid(versions, tmp_path):
    root, _, second = versions
    found = [data for name, data in members(root / "two") if name.endswith(".png")]
    assert sorted(found) == sorted(path.read_bytes() for path in (root / "raw").glob("*.png"))
    report = tmp_path / "report.json"
    config = ValidateConfig(input_dir=str(second.path), output_file=str(report), num_workers="1")
    assert run_verify(config) == 0


def test_version_of_the_parent_and_the_transforms_are_on_record(versions):
    _, first, second = versions
    assert (first.parent, second.parent) == (None, first.version)
    assert first.transforms == second.transforms == {"target_size": [64], "format": "png"}
    assert first.version != second.version


def test_repeated_command_changes_nothing(versions):
    root, _, second = versions
    before = {path: path.stat().st_mtime_ns for path in (root / "two").glob("[iv]*-*")}
    assert write(root, "two", "one").version == second.version
    assert {path: path.stat().st_mtime_ns for path in (root / "two").glob("[iv]*-*")} == before


def test_other_images_in_the_same_folder_name_the_parent_as_remedy(versions):
    root, _, _ = versions
    with pytest.raises(UserError, match=r"--output_dir .*new folder, with --parent .*dataset\.json"):
        write(root, "one")


def test_missing_parent_is_an_error_before_anything_is_read(versions):
    root, _, _ = versions
    with pytest.raises(DataError, match=r"--parent .*does not exist"):
        write(root, "three", "nothing")
    assert not (root / "three").exists()


def test_parent_that_is_no_version_is_refused(versions, tmp_path):
    _, first, _ = versions
    content = json.loads(first.path.read_text())
    (tmp_path / "dataset.json").write_text(json.dumps(content | {"parent": 5}))
    with pytest.raises(DataError, match="parent"):
        read_dataset(tmp_path / "dataset.json")
