"""Which files of a folder are images, and how they are split into training and validation."""

import os
import shutil
import sys

import pytest

from vae.images.folder import Skips, check_images, code_of, list_images, print_skips, split_names, walk_images
from vae.prepare.split import find_manifest
from vae.system.errors import DataError


def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")


def test_dataset_of_shards_is_refused_without_its_password(tmp_path):
    """The commands that read folders only; one of them looks for a manifest."""
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(DataError, match=r"--input_dir .*dataset\.json .*shards.* give a folder"):
        check_images(tmp_path / "dataset.json", flag="--input_dir")
    address = "https://me:5ecret@host/dataset.json?a=5ecret"
    for refuse in (check_images, find_manifest):
        with pytest.raises(DataError, match=r"https://host/dataset\.json") as caught:
            refuse(address)
        assert "5ecret" not in str(caught.value)


def test_list_is_sorted_and_recursive(tmp_path):
    expected = [
        "a.jpg",
        "b.PNG",
        "sub/deep/c.tiff",
        "sub/d.avif",
        "Ümlaut é.webp",
        "e.bmp",
        "f.jpeg",
        "g.tif",
        "i.gif",
    ]
    for name in expected:
        touch(tmp_path / name)
    for name in ("._a.jpg", ".hidden.png", "Thumbs.db", "notes.txt", "list.json", ".cache/x.png", "g.psd"):
        touch(tmp_path / name)
    (tmp_path / "folder.jpg").mkdir()
    touch(tmp_path / "folder.jpg" / "h.png")
    touch(tmp_path / "README")
    (tmp_path / "photo").write_bytes(b"\x89PNG\r\n\x1a\n")  # by content, without an extension
    assert list_images(tmp_path) == sorted([*expected, "folder.jpg/h.png", "photo"])


# What disks, NAS, cameras and other programs put beside photographs.
OTHERS = (
    "@eaDir/a.jpg/SYNOPHOTO_THUMB_XL.jpg", "#recycle/old.jpg", "#snapshot/x/old.png", "SYNOPHOTO_THUMB_M.jpg",
    "@Recycle/old.jpg", ".@__thumb/s100a.jpg", "@Recently-Snapshot/old.jpg",
    "$RECYCLE.BIN/S-1-5-21/$R1.jpg", "System Volume Information/x.png", "lost+found/1.png",
    ".Trash-1000/files/old.png", ".thumbnails/a.jpg", "sub/.thumbnails/normal/1.png", "__MACOSX/._a.jpg",
    "._a.jpg", "sub/._b.png", ".Trashes/501/a.png", "Pictures.photoslibrary/resources/derivatives/1.jpeg",
    "Catalog Previews.lrdata/0/1.jpg", "sub/CaptureOne/Cache/Thumbnails/a.jpg", ".dtrash/files/old.jpg",
    ".picasaoriginals/a.jpg", ".stversions/a~1.jpg", ".comments/a.jpg", "PRIVATE/M4ROOT/THMBNL/C1.JPG",
    "appdata_oc1/preview/1.jpg", ".git/x.png", ".dropbox.cache/a.jpg", ".hidden.png", "trashbox/a.jpg",
)  # fmt: skip
SILENT = (
    ".DS_Store", "Thumbs.db", "desktop.ini", "Icon\r", ".picasa.ini", "a.xmp", "a.AAE", "a.THM", "a.json",
)  # fmt: skip
PHOTOGRAPHS = (
    "a.jpg", "sub/b.png", "Pictures.photoslibrary/originals/0/1.jpeg", "recycled/paper.jpg", "thumbs/c.jpg",
    "100CANON/IMG_1.JPG", "lost/found.png", "eaDir/d.jpg", "sub/a..b.jpg", "Lightroom/e.tif",
)  # fmt: skip


def test_files_of_other_programs_are_skipped_by_name_and_counted_once(tmp_path, capsys):
    for name in (*OTHERS, *SILENT, *PHOTOGRAPHS):
        if sys.platform != "win32" or name.isprintable():
            touch(tmp_path / name)
    assert list_images(tmp_path) == sorted(PHOTOGRAPHS)
    (line,) = capsys.readouterr().out.splitlines()
    assert f"--data_path {tmp_path}: skips {len(OTHERS)} folders and images that are hidden" in line
    for name in OTHERS:  # as in a tar file or on a store
        assert code_of(name) in ("system", "hidden"), name
    assert not any(map(code_of, PHOTOGRAPHS))


def test_such_a_folder_is_read_if_it_is_the_one_that_is_given(tmp_path):
    touch(tmp_path / "@eaDir" / ".thumbnails" / "a.jpg")
    assert list_images(tmp_path / "@eaDir" / ".thumbnails") == ["a.jpg"]
    with pytest.raises(DataError, match=r"contains no images .*but 1 folders.* for example \.thumbnails"):
        list_images(tmp_path / "@eaDir")


def test_files_of_other_formats_are_counted_by_extension(tmp_path, capsys):
    others = ("photos.zip", "sub/part2.tar", "more.parquet")
    for name in (
        *("a.jpg", "b.psd", "sub/c.PSD", "d.CR2", "e.mov", "g.HIF", "h.ppm", "notes.txt", "._d.psd", "f.xmp"),
        *others,
    ):
        touch(tmp_path / name)
    assert list_images(tmp_path) == ["a.jpg"]
    line, archives = capsys.readouterr().out.splitlines()
    for token in (
        "WARNING",
        f"--data_path {tmp_path}",
        "6 files",
        "2 .psd",
        "1 .cr2",
        "1 .hif",
        "PNG or JPEG",
    ):
        assert token in line
    assert f"WARNING: --data_path {tmp_path}: skips 3 archives" in archives
    for name in ("b.psd", "sub/c.PSD", "d.CR2", "e.mov", "g.HIF", "h.ppm", *others):
        (tmp_path / name).unlink()
    list_images(tmp_path)
    assert capsys.readouterr().out == ""


def test_folder_that_cannot_be_read_is_a_warning(tmp_path, capsys):
    for name in ("a.png", "good/b.png", "lost/c.png"):
        touch(tmp_path / name)
    skips = Skips()
    names = walk_images(tmp_path, on_skip=skips.add)
    found = [next(names)]
    shutil.rmtree(tmp_path / "lost")  # as a share that is disconnected; root may read everything
    assert [*found, *names] == ["a.png", "good/b.png"]
    print_skips(skips, "--data_path x")
    assert "WARNING: --data_path x: skips 1 folder that cannot be read, for example lost" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *(("photos.tar", "--mode index"), ("photos.TGZ", "unpack"), ("data.arrow", "to_parquet")),
        *(("table.parquet", "--mode shard"), ("list.txt", "--mode shard"), ("photo.jpg", "folder")),
    ],
)
def test_files_of_many_images_name_the_next_command(tmp_path, name, part):
    touch(tmp_path / "in" / name)
    paths = [tmp_path / "in" / name] + [tmp_path / "in"] * (name not in ("list.txt", "photo.jpg"))
    for path in paths:
        with pytest.raises(DataError, match=rf"{part}.*") as caught:
            check_images(path)
        assert str(path) in str(caught.value)


@pytest.mark.skipif(sys.platform == "win32", reason="links and FIFOs need rights on Windows")
def test_links_are_followed_once_and_special_files_skipped(tmp_path):
    touch(tmp_path / "data/a.png")
    touch(tmp_path / "elsewhere/b.png")
    (tmp_path / "data/loop").symlink_to(tmp_path / "data")
    (tmp_path / "data/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/broken.png").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "data/pipe.png")
    (tmp_path / "data/device.png").symlink_to("/dev/zero")
    (tmp_path / "data/self").symlink_to("self")
    (tmp_path / "data/self.png").symlink_to("self.png")
    assert list_images(tmp_path / "data") == ["a.png", "broken.png", "linked/b.png"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux allows such names")
def test_names_that_are_not_utf8_are_listed(tmp_path):
    with open(os.path.join(os.fsencode(tmp_path), b"caf\xe9.png"), "wb") as file:
        file.write(b"x")
    names = list_images(tmp_path)
    assert len(names) == 1
    assert os.path.exists(os.path.join(tmp_path, names[0]))
    assert split_names([*names, "b.png"], 0.5, 0)


def test_small_validation_set_is_rounded_share_at_least_one_never_all():
    cases = [(10, 0.1, 1), (3, 0.01, 1), (2, 0.9, 1), (24, 0.3, 7), (999, 0.05, 50), (5, 0, 0)]
    for count, share, expected in cases:
        names = [f"{index}.png" for index in range(count)]
        train, val = split_names(names, share, seed=0)
        assert len(val) == expected
        assert sorted(train + val) == sorted(names)
        assert val == [name for name in names if name in set(val)]
    assert split_names(["only.png"], 0.5, 0) == (["only.png"], [])


def test_large_sets_keep_their_split_when_images_are_added():
    names = [f"folder/{index}.png" for index in range(4000)]
    _, before = split_names(names, 0.1, seed=3)
    _, after = split_names(sorted(names + [f"new/{index}.jpg" for index in range(400)]), 0.1, seed=3)
    assert set(before) == set(after) & set(names)
    assert 0.08 < len(before) / 4000 < 0.12
    _, other = split_names(names, 0.1, seed=4)
    assert len(set(before) & set(other)) < 100  # another seed gives another split


def test_split_does_not_depend_on_order_of_names():
    names = [f"{index}.png" for index in range(50)]
    assert set(split_names(names, 0.2, 1)[1]) == set(split_names(names[::-1], 0.2, 1)[1])
