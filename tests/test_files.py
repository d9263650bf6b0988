"""Files: atomic writes, SHA-256, and the existing part of a path."""

import hashlib
import os

import pytest

from vae.files import atomic_path, nearest_existing, sha256_of_file, why_not_writable


def test_file_exists_only_when_complete(tmp_path):
    path = tmp_path / "new" / "file.txt"
    with atomic_path(path) as temporary:
        temporary.write_text("complete")
        assert not path.exists()
    assert path.read_text() == "complete"
    assert list(path.parent.iterdir()) == [path]


def test_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def fail():
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_permissions_follow_the_umask(tmp_path):
    path = tmp_path / "file.bin"
    before = os.umask(0o022)
    try:
        with atomic_path(path) as temporary:
            temporary.unlink()
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))  # as safetensors does
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("size", [0, 3, 2**20, 2**20 + 1])
def test_sha256_of_file(tmp_path, size):
    content = os.urandom(size)
    (tmp_path / "file.bin").write_bytes(content)
    assert sha256_of_file(tmp_path / "file.bin") == hashlib.sha256(content).hexdigest()


def test_sha256_of_missing_file_raises(tmp_path):
    with pytest.raises(OSError, match="missing"):
        sha256_of_file(tmp_path / "missing")


def test_why_not_writable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert why_not_writable(tmp_path) is None
    assert why_not_writable(tmp_path / "a" / "b") is None
    assert why_not_writable(tmp_path / "file") == "is a file: use another folder"
    assert f"inside of {tmp_path / 'file'}, which is a file" in why_not_writable(tmp_path / "file" / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # permissions do not stop root
    expected = f"cannot be written ({tmp_path}: Permission denied): change its permissions or use"
    assert why_not_writable(tmp_path / "a").startswith(expected)


def test_nearest_existing(tmp_path, monkeypatch):
    assert nearest_existing(tmp_path) == tmp_path
    assert nearest_existing(str(tmp_path / "a" / "b")) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert nearest_existing("a/b") == tmp_path
