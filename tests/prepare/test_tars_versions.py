"""--parent of --mode index: a new version reads only new tar files; removal writes no tar file or index."""

import hashlib
import json
import shutil
import sys

import pytest

from tests.harness.image_kinds import detailed, encoded
from tests.harness.preparing import prepare
from tests.harness.sharded_runs import record_samples, samples_of_steps
from tests.harness.tars import images_of, picture, webdataset_sample, write_tar, write_webdataset
from vae.shards.dataset_json import read_dataset
from vae.shards.index import index_path
from vae.shards.shard_images import ShardImages
from vae.training.run import train

SUBSETS = ("dataset.json", "validation.json")
opened: list[str] | None = None  # tar files, while it is a list


def hook(event, arguments):
    if event == "open" and opened is not None and str(arguments[0]).endswith(".tar"):
        opened.append(str(arguments[0]))


sys.addaudithook(hook)  # it cannot be removed again


def index(source, output, *flags):
    """Index tar files (None: none) in this process; returns the output and the tar files that were opened."""
    global opened
    opened = []
    try:
        inputs = ("--input", source) if source else ()
        done = prepare("--mode", "index", *inputs, "--output_dir", output, *flags)
        return done, set(opened)
    finally:
        opened = None


def read_all(path):
    """The bytes of all images of a dataset by their names."""
    images = ShardImages(read_dataset(path), 1)
    return {images.name(n): images.read(n) for n in range(len(images))}


def key(data):
    return hashlib.sha256(data).hexdigest()[:32]


def changes(folder):
    return {name: json.loads((folder / name).read_text())["changes"] for name in SUBSETS}


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """400 images in 4 tar files, a fifth tar file without any, and a version with 10 more."""
    root = tmp_path_factory.mktemp("grown")
    old = write_webdataset(root / "tars" / "old", tars=4, images=100)
    write_tar(old / "texts.tar", [("a.txt", b"no image")])
    samples = [member for number in range(400, 410) for member in webdataset_sample(number)]
    new = write_tar(root / "tars" / "new" / "a.tar", samples)
    flags = ("--val_split", "0.1")
    done, _ = index(old, root / "one", *flags)
    assert done.returncode == 0, done.stderr
    flags += ("--parent", root / "one" / "dataset.json")
    done, opens = index(root / "tars", root / "two", *flags)
    assert done.returncode == 0, done.stderr
    return root, new, flags, opens, done.stdout


def test_four_hundred_and_ten_images_cost_ten(grown):
    root, new, flags, opens, printed = grown
    assert opens == {str(new)}
    first, second = (
        {**read_all(root / f / a), **read_all(root / f / b)} for f in ("one", "two") for a, b in [SUBSETS]
    )
    assert second == {f"old/{name}": data for name, data in first.items()} | {
        f"new/{name}": data for name, data in images_of(new).items()
    }
    assert len(second) == 410
    dataset, before = (read_dataset(root / name / SUBSETS[0]) for name in ("two", "one"))
    assert (dataset.parent, dataset.tars) == (before.version, str(root / "tars"))
    for shard in before.shards:
        assert index_path(before.index_folder, shard).samefile(
            root / "two/training/old" / f"{shard.name[:-4]}.npy"
        )
    added = [change["added"] for change in changes(root / "two").values()]
    assert sum(one["images"] for one in added) == 10
    assert {"new/a.tar"} == {name for one in added for name in one["shards"]}
    assert all(one["removed"] == {"images": 0, "shards": []} for one in changes(root / "two").values())
    assert f"({before.samples} of --parent and {dataset.samples - before.samples} new)" in printed
    done, opens = index(root / "tars", root / "two", *flags)
    assert (done.returncode, opens) == (0, set())
    assert read_dataset(root / "two" / SUBSETS[0]).version == dataset.version


@pytest.fixture(scope="module")
def removal(grown, tmp_path_factory):
    """A version without all images of a tar file, one more training image and one validation image."""
    root, _, _, _, _ = grown
    train, val = (read_all(root / "two" / name) for name in SUBSETS)
    names = [name for name in {**train, **val} if name.startswith("old/kodak-000002.tar")]
    names += [next(iter(train)), next(iter(val))]
    gone = {key({**train, **val}[name]) for name in names}
    folder = tmp_path_factory.mktemp("removal")
    (folder / "keys.txt").write_text("\n".join(sorted(gone)))
    flags = ("--parent", root / "two" / "dataset.json", "--remove", folder / "keys.txt")
    done, opens = index(None, folder / "set", *flags)
    assert (done.returncode, opens) == (0, set()), done.stderr
    return root, folder, gone


def test_removal_writes_no_tar_and_no_index(removal):
    root, folder, gone = removal
    for old in (root / "two").rglob("*.npy"):
        here = folder / "set" / old.relative_to(root / "two")
        assert here.samefile(old) if here.exists() else "kodak-000002" in here.name
    for name in SUBSETS:
        expected = {n: data for n, data in read_all(root / "two" / name).items() if key(data) not in gone}
        assert read_all(folder / "set" / name) == expected
    removed = [change["removed"] for change in changes(folder / "set").values()]
    assert sum(one["images"] for one in removed) == len(gone) == 102
    assert all(one["shards"] == ["old/kodak-000002.tar"] for one in removed)


def test_removed_images_stay_out_of_new_tars_and_of_later_versions(removal, tmp_path):
    """Also if their bytes come again, in a tar file of another name."""
    _, folder, gone = removal
    again = write_tar(tmp_path / "again.tar", [m for n in (205, 500) for m in webdataset_sample(n)])
    flags = ("--val_split", "0.1", "--parent", folder / "set" / "dataset.json")
    done, opens = index(again, tmp_path / "set", *flags)
    assert (done.returncode, opens) == (0, {str(again)}), done.stderr
    found = [key(data) for name in SUBSETS for data in read_all(tmp_path / "set" / name).values()]
    assert not gone & set(found)
    assert len(found) == 410 - 102 + 1


def test_equal_images_in_several_tars_are_all_removed(tmp_path):
    folder = write_webdataset(tmp_path / "tars", tars=2)
    (folder / "copy.tar").write_bytes((folder / "kodak-000000.tar").read_bytes())
    assert index(folder, tmp_path / "one")[0].returncode == 0
    gone = next(iter(read_all(tmp_path / "one" / "dataset.json").values()))
    (tmp_path / "keys.txt").write_text(key(gone))
    flags = ("--parent", tmp_path / "one" / "dataset.json", "--remove", tmp_path / "keys.txt")
    assert index(None, tmp_path / "two", *flags)[0].returncode == 0
    left = list(read_all(tmp_path / "two" / "dataset.json").values())
    assert gone not in left
    assert len(left) == 13


def test_images_are_named_as_training_and_the_url_column_name_them(tmp_path):
    """Two tar files have members of the same name; only the metadata need the tar files."""
    for tar in "ab":
        for_tar = [(f"{n}.png", f"{n}.json", picture(n + 10 * ord(tar))) for n in range(3)]
        members = [
            member
            for image, text, data in for_tar
            for member in ((image, data), (text, json.dumps({"url": f"http://{tar}/{image}"}).encode()))
        ]
        write_tar(tmp_path / "tars" / f"{tar}.tar", members)
    assert index(tmp_path / "tars", tmp_path / "one")[0].returncode == 0
    flags = ("--parent", tmp_path / "one" / "dataset.json", "--remove", tmp_path / "names.txt")
    (tmp_path / "names.txt").write_text("a.tar/1.png\n")
    done, opens = index(None, tmp_path / "two", *flags)
    assert (done.returncode, opens) == (0, set()), done.stderr
    (tmp_path / "names.txt").write_text("a.tar/1.png\nhttp://b/2.png\n")
    assert index(None, tmp_path / "three", *flags)[0].returncode == 0
    names = {f"{tar}.tar/{n}.png" for tar in "ab" for n in range(3)}
    assert read_all(tmp_path / "two" / "dataset.json").keys() == names - {"a.tar/1.png"}
    assert read_all(tmp_path / "three" / "dataset.json").keys() == names - {"a.tar/1.png", "b.tar/2.png"}


@pytest.mark.slow
def test_training_never_draws_a_removed_image(removal, tiny, tmp_path):
    _, folder, gone = removal
    path = folder / "set" / "dataset.json"
    given = {name: value for name, value in tiny.items() if name != "val_split"}
    with record_samples(tmp_path / "samples"):
        assert train({**given, "data_path": str(path), "batch_size": 16, "num_epochs": 2}) == 0
    drawn = [k for keys in samples_of_steps(tmp_path / "samples", path).values() for k in keys]
    assert len(set(drawn)) > 250
    assert not set(drawn) & gone


# ---- --input dataset.json ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    """Images of 40 to 100 px, with names of different lengths, and their dataset."""
    root = tmp_path_factory.mktemp("sizes")
    for tar in range(3):
        members = []
        for number in range(12):
            image = detailed(seed=100 * tar + number, height=40 + 5 * number, width=100 - 5 * number)
            key = f"{tar}{'x' * number}"
            members += [
                (f"{key}.png", encoded(image, "PNG")),
                (f"{key}.json", json.dumps({"n": number}).encode()),
            ]
        write_tar(root / "tars" / f"{tar}.tar", members)
    assert index(root / "tars", root / "one", "--val_split", "0.3", "--where", "n<11")[0].returncode == 0
    return root


def datasets(folder):
    """The files of both datasets, without what a command notes for itself."""
    names = [*SUBSETS, *(path.relative_to(folder) for path in folder.rglob("*.npy"))]
    return {str(name): (folder / name).read_bytes() for name in names}


def test_filter_equals_indexing_with_all_rules_and_opens_no_tar(sizes, tmp_path):
    rules = ("--min_size", "50", "--max_aspect", "1.6", "--max_pixels", "5500")
    done, opens = index(sizes / "one" / "dataset.json", tmp_path / "two", *rules, "--where", "width>=55")
    assert (done.returncode, opens) == (0, set()), done.stderr
    done, opens = index(
        sizes / "tars", tmp_path / "direct", *rules, "--val_split", "0.3", "--where", "n<11 and width>=55"
    )
    assert len(opens) == 3
    assert datasets(tmp_path / "two") == datasets(tmp_path / "direct")
    assert (
        0 < len(read_all(tmp_path / "two" / "dataset.json")) < len(read_all(sizes / "one" / "dataset.json"))
    )
    before = datasets(tmp_path / "two")
    assert index(sizes / "one" / "dataset.json", tmp_path / "two", *rules)[0].returncode == 78
    assert datasets(tmp_path / "two") == before


def test_filter_keeps_removed_images_out(sizes, tmp_path):
    gone = key(next(iter(read_all(sizes / "one" / "dataset.json").values())))
    (tmp_path / "keys.txt").write_text(gone)
    flags = ("--parent", sizes / "one" / "dataset.json", "--remove", tmp_path / "keys.txt")
    assert index(None, tmp_path / "two", *flags)[0].returncode == 0
    done, _ = index(tmp_path / "two" / "dataset.json", tmp_path / "three", "--min_size", "45")
    assert done.returncode == 0, done.stderr
    shutil.copy(sizes / "tars" / "0.tar", tmp_path / "again.tar")
    flags = ("--min_size", "45", "--val_split", "0.3", "--where", "n<11")
    done, _ = index(tmp_path, tmp_path / "four", *flags, "--parent", tmp_path / "three" / "dataset.json")
    assert done.returncode == 0, done.stderr
    for folder in ("three", "four"):
        assert gone not in {key(data) for data in read_all(tmp_path / folder / "dataset.json").values()}


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        (("--where", "n>3"), ("--where", "width and height", "not n")),
        (("--formats", "png"), ("--formats", "leave it out")),
        (("--min_size", "500"), ("no image is left",)),
    ],
)
def test_filter_names_what_an_index_cannot_answer(sizes, tmp_path, flags, tokens):
    done, opens = index(sizes / "one" / "dataset.json", tmp_path / "set", *flags)
    assert done.returncode in (77, 78)
    assert all(token in done.stdout + done.stderr for token in tokens)
    assert opens == set()
    assert not (tmp_path / "set" / "dataset.json").exists()


# ---- mistakes ----------------------------------------------------------------------------------------------


def test_mistakes_are_one_line(grown, tmp_path):
    root, new, _, _, _ = grown
    parent = ("--parent", root / "two" / "dataset.json")
    (tmp_path / "keys.txt").write_text("0" * 32)
    for source, flags, tokens in (
        (new, parent, ("--val_split 0.1", "use those")),
        (new, (*parent, "--val_split", "0.1", "--where", "a>1"), ("no --where",)),
        (new, ("--remove", tmp_path / "keys.txt"), ("--remove", "--parent")),
        (
            None,
            (*parent, "--remove", tmp_path / "keys.txt", "--min_size", "9"),
            ("--min_size", "leave it out"),
        ),
    ):
        done, opens = index(source, tmp_path / "set", *flags)
        assert done.returncode in (2, 78)
        (line,) = done.stderr.strip().splitlines()
        assert all(token in line for token in tokens), line
        assert opens == set()
    assert not (tmp_path / "set").exists()
