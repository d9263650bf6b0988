"""--mode index: tar files that others wrote are read where they are, byte for byte, and never changed."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from tests.harness.preparing import prepare, shard
from tests.harness.tars import (
    images_of,
    img2dataset_sample,
    picture,
    webdataset_sample,
    write_img2dataset,
    write_tar,
    write_webdataset,
)
from vae.prepare import tar_source
from vae.prepare.blocks import common_folder, find_files
from vae.shards.dataset_json import read_dataset
from vae.shards.shard_images import ShardImages
from vae.system.errors import DataError, UserError


def index(source, output, *flags, **expected):
    return prepare("--mode", "index", "--input", source, "--output_dir", output, *flags, **expected)


def read_all(path):
    """The bytes of all images of a dataset by their names."""
    images = ShardImages([read_dataset(path)], 1)
    return {images.name(n): images.read(n) for n in range(len(images))}


def left_out(output):
    """Name, reason of what a command has listed."""
    rows = map(json.loads, (output / "rejected.jsonl").read_text().splitlines())
    return {(row.get("name", row["tar"]), row["reason"]) for row in rows}


@pytest.mark.parametrize("write", [write_webdataset, write_img2dataset])
def test_images_have_the_bytes_of_the_members_and_the_tars_do_not_change(write, tmp_path):
    folder = write(tmp_path / "tars")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    index(folder, tmp_path / "set", code=0)
    path = tmp_path / "set" / "dataset.json"
    assert read_all(path) == images_of(*sorted(folder.glob("*.tar")))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before

    version, everything = read_dataset(path).version, read_all(path)
    folder.rename(tmp_path / "moved")  # does not change the version, and with it resuming
    path.write_text(path.read_text().replace(folder.as_posix(), (tmp_path / "moved").as_posix()))
    assert (read_dataset(path).version, read_all(path)) == (version, everything)


def test_texts_before_and_after_an_image_are_its_metadata(tmp_path):
    members = [*webdataset_sample(7), *webdataset_sample(8), *img2dataset_sample(9)]
    write_tar(tmp_path / "tars" / "a.tar", members)
    index(tmp_path / "tars" / "a.tar", tmp_path / "set", code=0)
    images = ShardImages([read_dataset(tmp_path / "set" / "dataset.json")], 1)
    assert [images.metadata(n) for n in range(2)] == [
        {"source": "class1/000007.png", "caption": "a text", "label": "1"},
        {"source": "class0/000008.png", "caption": "a text", "label": "0"},
    ]
    third = images.metadata(2)
    assert (third["caption"], third["punsafe"], third["source"]) == ("picture 9", 0.9, "000000009.jpg")


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_names_with_a_point_are_read(format, tmp_path):
    """Such a name is in two fields of a header, or in blocks of its own."""
    key = f"./{'folder' * 20}/{'k' * 90}"
    members = [(f"{key}.png", picture(0)), (f"{key}.json", b'{"label": 3}')]
    tar = write_tar(tmp_path / "a.tar", members, format)
    index(tar, tmp_path / "set", code=0)
    assert read_all(tmp_path / "set" / "dataset.json") == images_of(tar)
    images = ShardImages([read_dataset(tmp_path / "set" / "dataset.json")], 1)
    assert images.metadata(0) == {"source": f"{key[2:]}.png", "label": 3}


@pytest.mark.parametrize("mode", ["shard", "index"])
def test_tar_of_a_hidden_folder_is_read_like_the_folder(mode, tmp_path):
    folder = tmp_path / "of a user/.photos"
    (folder / ".thumbnails").mkdir(parents=True)
    for name in ("a.png", ".thumbnails/b.png"):
        (folder / name).write_bytes(picture(len(name)))
    tar = shutil.make_archive(str(tmp_path / "a"), "tar", tmp_path, "of a user/.photos")
    if mode == "shard":
        shard(tar, tmp_path / "set", "--val_split", "0", code=0)
    else:
        index(tar, tmp_path / "set", code=0)
    assert list(read_all(tmp_path / "set/dataset.json").values()) == [picture(5)]


def test_odd_members_are_counted_and_cost_no_other_image(tmp_path):
    link, hard, sparse = (tarfile.TarInfo(f"{name}.png") for name in ("link", "hard", "sparse"))
    link.type, link.linkname = tarfile.SYMTYPE, "good.png"
    hard.type, hard.linkname = tarfile.LNKTYPE, "good.png"
    sparse.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,0"}
    sparse.pax_headers |= {"GNU.sparse.size": "0"}
    members = [
        ("good.png", picture(0)),
        ("good.jpg", picture(1, "JPEG")),
        ("good.edited.png", picture(2)),
        ("good.png", picture(3)),
        link,
        hard,
        sparse,
        ("cut.png", picture(4)[:-20]),
        ("text.png", b"no picture"),
        ("twin.png", picture(0)),
        ("words.txt", b"no picture"),
        ("README", b"no key"),
        ("__MACOSX/._last.png", b"of another program"),
        ("last.png", picture(5)),
        ("good.png", picture(6)),
    ]
    tar = write_tar(tmp_path / "a.tar", members, tarfile.PAX_FORMAT)
    done = index(tar, tmp_path / "set", code=0)
    expected = {"a.tar/good.png": picture(0), "a.tar/last.png": picture(5)}
    assert read_all(tmp_path / "set" / "dataset.json") == expected
    assert left_out(tmp_path / "set") == {("cut.png", "truncated"), ("text.png", "not_an_image")}
    assert "1 exact duplicate" in done.stdout
    for line in (
        "3  not_a_file: link.png",
        "2  several_images: good.jpg",
        "2  duplicate_key: good.png",
        "1  no_image: words",
        "1  other_file: README",
        "1  system: __MACOSX/._last.png",
    ):
        assert f"skipped        {line}" in done.stdout
    index(tar, tmp_path / "other", "--image_key", "edited.png")
    assert read_all(tmp_path / "other" / "dataset.json") == {"a.tar/good.edited.png": picture(2)}


NAMED = {
    "screenshots": {f"./Screenshot 2024-05-01 at 12.30.{n:02}.png": "read" for n in range(40)},
    "dates in the order of a folder": dict.fromkeys(("22.05.png", "22.06.png", "x.png", "22.07.png"), "read"),
    "words": dict.fromkeys(("cat.edited.png", "cat.final.v2.png", "Mr. Smith.png", "a.jpg.png"), "read"),
    "numbers": dict.fromkeys(("a/x.0.png", "a/x.1.png", "b.c/x.png"), "read"),
    "twice": {"22.05.png": "read", "./22.05.png": ""},
    "of other programs": {"__MACOSX/._a.png": "", "._a.png": "", "a.png": "read", "@eaDir/a.png/S.png": ""},
    "hidden": {".a.png": "", "a.png": "read", "b/.thumbnails/c.png": ""},
    "a mask is no image": {"a.seg.png": "", "a.png": "read", "b.txt": ""},
}


@pytest.mark.parametrize("kind", NAMED)
def test_names_with_points_are_read_as_people_mean_them(kind, tmp_path):
    members = {name: picture(number) for number, name in enumerate(NAMED[kind])}
    tar = write_tar(tmp_path / "a.tar", [*members.items(), ("last.png", picture(99))])
    index(tar, tmp_path / "set", code=0)
    expected = {f"a.tar/{name.removeprefix('./')}": members[name] for name in members
                if NAMED[kind][name] == "read"}  # fmt: skip
    assert read_all(tmp_path / "set" / "dataset.json") == {**expected, "a.tar/last.png": picture(99)}


BROKEN = {
    "unexpected end of data": lambda data: data[: len(data) // 2],
    "without an end mark": lambda data: data[: -(-len(data.rstrip(b"\0")) // 512) * 512],
    "no tar file": lambda data: b"x" * 2000,
    "damaged (": lambda data: data[:1024] + b"?" * 512 + data[1536:],
}


def test_broken_tars_are_named_and_read_again(tmp_path, monkeypatch):
    folder = write_webdataset(tmp_path / "tars", tars=1 + len(BROKEN), images=2)
    good = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    for path, damage in zip(list(good)[1:], BROKEN.values(), strict=True):
        path.write_bytes(damage(good[path]))
    done = index(folder, tmp_path / "set", code=77)
    lines = [line for line in done.stdout.splitlines() if "broken  " in line]
    for line, path, reason in zip(lines, list(good)[1:], BROKEN, strict=True):
        assert path.name in line
        assert reason in line
    assert not (tmp_path / "set" / "dataset.json").exists()
    index(folder, tmp_path / "less", "--skip_broken_tars", code=0)
    assert len(read_all(tmp_path / "less" / "dataset.json")) == 2
    for path, data in good.items():
        path.write_bytes(data)
    items, names = tar_source.TarBlock.items, []
    monkeypatch.setattr(
        tar_source.TarBlock, "items", lambda b, facts: names.append(b.file) or items(b, facts)
    )
    index(folder, tmp_path / "set", code=0)
    assert names[-len(BROKEN) :] == list(good)[1:]
    assert len(read_all(tmp_path / "set" / "dataset.json")) == 10
    index(folder, tmp_path / "less", "--skip_broken_tars", code=78, says="never changes")


def test_rules_leave_images_out_and_write_no_tar(tmp_path):
    folder = write_img2dataset(tmp_path / "tars")
    done = index(
        folder, tmp_path / "set", "--where", "punsafe < 0.5 and width >= 64 and status = 'success'", code=0
    )
    names = [name.rpartition("/")[2] for name in read_all(tmp_path / "set" / "dataset.json")]
    assert names == [f"{number:09}.jpg" for number in range(5)]
    assert "left out      15  where" in done.stdout
    assert list((tmp_path / "set").rglob("*.tar")) == []
    for number, flags in enumerate((("--min_size", "65"), ("--where", "width > 64 or format <> 'JPEG'"))):
        index(folder, tmp_path / f"none{number}", *flags, code=77, says="no image is left")
    index(folder, tmp_path / "set", "--where", "punsafe < 0.4", code=78, says="never changes")


# ---- --input -----------------------------------------------------------------------------------------------


def names_of(text):
    return common_folder(find_files(str(text), "--input", (".tar",)), "--input")


def test_folders_patterns_and_lists_name_the_same_tars(tmp_path):
    folder = write_webdataset(tmp_path / "tars" / "a")
    write_webdataset(tmp_path / "tars" / "b", tars=1)
    names = [f"a/kodak-{n:06}.tar" for n in range(3)] + ["b/kodak-000000.tar"]
    listed = tmp_path / "list.txt"
    listed.write_text("# mine\ntars/a/kodak-{000000..000002}.tar\n\n" + str(folder.parent / names[3]) + "\n")
    for text in (folder.parent, listed):
        assert names_of(text) == (folder.parent.as_posix(), names)
    assert names_of(f"{folder}/kodak-*.tar")[1] == [name[2:] for name in names[:3]]
    assert names_of(f"{folder.parent}/{{a,b}}/kodak-000000.tar")[1] == [names[0], names[3]]
    remote = names_of("https://host/x/{9..11}/{00..01}.tar")
    assert remote == ("https://host/x", [f"{n}/{m:02}.tar" for n in (9, 10, 11) for m in (0, 1)])
    drive = [Path("c:/sets/a.tar"), Path("C:/sets/b.tar")]
    assert common_folder(drive, "--input") == ("C:/sets", ["a.tar", "b.tar"])


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("https://me:pa55@host/{0..1}.tar", ("credentials", "https://")),
        ("https://host/{0..1}.tar?signature=5ecret", ("signature",)),
        ("s3://bucket/{0..1}.tar.gz", ("s3://bucket/0.tar.gz is compressed", "unpack")),
        ("{/x/a.tar,s3://bucket/b.tar}", ("no folder in common",)),
        ("{s3://one/a.tar,s3://two/b.tar}", ("no folder in common",)),
        ("/none/*.tar", ("has no .tar files",)),
        ("/nosuchfolder", ("does not exist",)),
        ("/none/a.parquet", ("does not exist",)),
    ],
)
def test_unusable_input_is_one_line(text, tokens):
    with pytest.raises((UserError, DataError)) as caught:
        names_of(text)
    assert all(token in str(caught.value) for token in tokens), caught.value
    assert "\n" not in str(caught.value)


# ---- rows of a dataset -------------------------------------------------------------------------------------


def test_selecting_again_equals_indexing_with_these_rules_and_reads_no_tar(tmp_path):
    folder = write_img2dataset(tmp_path / "tars")
    index(folder, tmp_path / "one", "--where", "punsafe < 1.5", "--val_split", "0.3")
    rules = ("--where", "punsafe >= 0.2", "--min_size", "64", "--val_split", "0.2")
    index(folder, tmp_path / "expected", *rules)
    folder.rename(tmp_path / "away")
    index(tmp_path / "one" / "dataset.json", tmp_path / "again", *rules, code=0)
    for name in ("dataset.json", "validation.json"):
        one, other = (read_dataset(tmp_path / which / name) for which in ("again", "expected"))
        assert [shard.index_sha256 for shard in one.shards] == [shard.index_sha256 for shard in other.shards]
    index(
        tmp_path / "one" / "dataset.json", tmp_path / "none", "--first_frame", code=78, says="--first_frame"
    )
    index(tmp_path / "again" / "dataset.json", tmp_path / "none", code=77, says="has no rows")
