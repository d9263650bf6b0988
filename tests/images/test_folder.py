"""Which files of a folder are images, and how they are split into training and validation."""

import os
import sys

import pytest

from vae.data.manifest import read_lines
from vae.images.decoding import decode_image
from vae.images.folder import check_images, list_images, split_names
from vae.images.formats import BadImageError
from vae.prepare.split import find_manifest
from vae.system.errors import DataError, UserError
from vae.system.files import sha256_of_file


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
    for name in (
        "b.PNG",
        "a.jpg",
        "sub/deep/c.tiff",
        "sub/d.avif",
        "Ümlaut é.webp",
        "e.bmp",
        "f.jpeg",
        "g.tif",
        "i.gif",
    ):
        touch(tmp_path / name)
    for name in ("._a.jpg", ".hidden.png", "Thumbs.db", "notes.txt", "list.json", ".cache/x.png", "g.psd"):
        touch(tmp_path / name)
    (tmp_path / "folder.jpg").mkdir()
    touch(tmp_path / "folder.jpg" / "h.png")
    found = list_images(tmp_path)
    expected = "a.jpg|b.PNG|sub/deep/c.tiff|sub/d.avif|Ümlaut é.webp|e.bmp|f.jpeg|g.tif|i.gif"
    assert found == sorted([*expected.split("|"), "folder.jpg/h.png"])


def test_image_files_that_cannot_be_read_are_reported(tmp_path, capsys):
    for name in ("a.jpg", "b.psd", "sub/c.PSD", "notes.txt", "._d.psd"):
        touch(tmp_path / name)
    assert list_images(tmp_path) == ["a.jpg"]
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    for token in ("WARNING", f"--data_path {tmp_path}", "2 files", "b.psd", "PNG or JPEG"):
        assert token in line
    (tmp_path / "b.psd").unlink()
    (tmp_path / "sub" / "c.PSD").unlink()
    list_images(tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(sys.platform == "win32", reason="links and FIFOs need rights on Windows")
def test_links_are_followed_once_and_special_files_skipped(tmp_path, capsys):
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
    (line,) = capsys.readouterr().out.splitlines()
    assert f"--data_path {tmp_path / 'data'}: skips 3 pipes" in line
    assert any(name in line for name in ("device.png", "pipe.png", "self.png"))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no FIFOs in folders")
def test_file_that_became_a_pipe_is_rejected_without_opening_it(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(BadImageError, match="not a regular file"):
        decode_image(tmp_path / "pipe.png")
    with pytest.raises(OSError, match="not a regular file"):
        sha256_of_file(tmp_path / "pipe.png")
    with pytest.raises(DataError, match="not a regular file"):
        list(read_lines(tmp_path / "pipe.png"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux allows such names")
def test_names_that_are_not_utf8_are_listed(tmp_path):
    with open(os.path.join(os.fsencode(tmp_path), b"caf\xe9.png"), "wb") as file:
        file.write(b"x")
    names = list_images(tmp_path)
    assert len(names) == 1
    assert os.path.exists(os.path.join(tmp_path, names[0]))
    assert split_names([*names, "b.png"], 0.5, 0)


def test_unusable_folder_reports_flag_and_path(tmp_path):
    touch(tmp_path / "file.png")
    (tmp_path / "empty").mkdir()
    for path, word in (("nothing", "does not exist"), ("file.png", "not a folder"), ("empty", "no images")):
        with pytest.raises(DataError) as caught:
            list_images(tmp_path / path)
        message = str(caught.value)
        assert "--data_path" in message
        assert str(tmp_path / path) in message
        assert word in message
        assert "\n" not in message


def test_small_validation_set_is_rounded_share_at_least_one_never_all():
    for count, share, expected in (
        (10, 0.1, 1),
        (3, 0.01, 1),
        (2, 0.9, 1),
        (24, 0.3, 7),
        (999, 0.05, 50),
        (5, 0, 0),
    ):
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


@pytest.mark.parametrize("share", [-0.1, 1.0, 5])
def test_invalid_val_split_is_an_error(share):
    with pytest.raises(UserError, match="--val_split"):
        split_names(["a", "b"], share, 0)
