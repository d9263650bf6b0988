"""A file appears whole or not at all."""

import os

import pytest

from vae.files import atomic_path


def test_a_file_is_there_only_when_it_is_whole(tmp_path):
    path = tmp_path / "new" / "file.txt"
    with atomic_path(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def test_what_fails_leaves_the_old_file_and_no_rest(tmp_path):
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
def test_who_may_read_a_file_is_the_umasks_to_say(tmp_path):
    path = tmp_path / "file.bin"
    before = os.umask(0o022)
    try:
        with atomic_path(path) as temporary:
            temporary.unlink()
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))  # as safetensors does
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
