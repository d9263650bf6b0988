"""Files: atomic writes, SHA-256, the existing part of a path, and whose a folder is."""

import hashlib
import os
import subprocess
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from tests.harness.runs import ROOT
from vae.system import files
from vae.system.errors import UserError
from vae.system.files import (
    MARKER_NAME,
    atomic_path,
    check_folder,
    claim_folder,
    long_path_remedy,
    nearest_existing,
    read_json,
    read_json_lines,
    read_marker,
    remove_temporary,
    sha256_of_file,
    shortened,
    why_not_writable,
)


def test_file_exists_only_when_complete(tmp_path):
    path = tmp_path / "new" / "file.txt"
    with atomic_path(path) as temporary:
        temporary.write_text("complete")
        assert not path.exists()
    assert path.read_text() == "complete"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("name", ["short", "日本", "日本" * 60, "caf\udce9" * 100])
def test_names_are_shortened_alike_in_every_locale(name, hashed):
    """Names in tar files are UTF-8, also on a machine whose locale cannot encode them."""
    here = shortened(name, name, hashed)
    assert (here == name) == (not hashed and len(name.encode("utf-8", "surrogateescape")) <= 240)
    assert len(here.encode("utf-8", "surrogateescape")) <= 240
    code = f"from vae.system.files import shortened; print(ascii(shortened(*[{name!a}] * 2, {hashed})))"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-X", "utf8=0", "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ascii(here)


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
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))  # as safetensors does
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


def test_files_of_killed_processes_are_removed_and_no_others(tmp_path):
    def leave(*names: str) -> Path:
        folder = tmp_path / f".vae-scratch-{len(list(tmp_path.iterdir())):016x}"
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        return folder

    ours = [leave("a.pt"), leave()]
    users = [tmp_path / ".vae-scratch-mine", tmp_path / "a.tmp"]
    for path in users:
        path.touch()
    remove_temporary(tmp_path)
    assert not any(path.exists() for path in ours)
    assert all(path.exists() for path in users)


@pytest.mark.parametrize("size", [0, 3, 2**20, 2**20 + 1])
def test_sha256_of_file(tmp_path, size):
    content = os.urandom(size)
    (tmp_path / "file.bin").write_bytes(content)
    assert sha256_of_file(tmp_path / "file.bin") == hashlib.sha256(content).hexdigest()


def test_why_not_writable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert why_not_writable(tmp_path) is None
    assert why_not_writable(tmp_path / "a" / "b") is None
    assert why_not_writable(tmp_path / "file") == "is a file: use another folder"
    assert f"inside of {tmp_path / 'file'}, which is a file" in why_not_writable(tmp_path / "file" / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "touch", refuse)  # permissions do not stop root
    expected = f"cannot be written ({tmp_path}: Permission denied): change its permissions or use"
    assert why_not_writable(tmp_path / "a").startswith(expected)


def test_folder_whose_files_windows_refuses(tmp_path, monkeypatch):
    """Without long paths, Windows says that the folder of a path of 260 characters is missing."""
    length = len(str(tmp_path)) + 10  # of the longest folder that is accepted; the one of tests may be long
    most = length + files._LONGEST
    monkeypatch.setattr(files, "_MAX_PATH", most)
    touch = Path.touch

    def limited(path, **how):
        if len(str(path.absolute())) > most:
            raise FileNotFoundError(2, "The system cannot find the path specified", str(path))
        touch(path, **how)

    monkeypatch.setattr(Path, "touch", limited)
    short, long = (tmp_path / ("x" * count) for count in (9, 10))
    assert why_not_writable(short) is None
    assert (
        f"has {length + 1} characters, and Windows refuses its files: allow long paths"
        in why_not_writable(long)
    )
    long.mkdir()
    assert "allow long paths (docs/WINDOWS_SETUP.md" in why_not_writable(long)
    assert list(long.iterdir()) == []


def test_a_long_path_that_windows_calls_missing_has_a_remedy(monkeypatch):
    error, short = (FileNotFoundError(2, "no path", "/" + n * "x") for n in (259, 10))
    assert long_path_remedy(error) == "" or os.name == "nt"
    monkeypatch.setattr(os, "name", "nt")
    assert "the path has 26" in long_path_remedy(error)  # with a drive letter on Windows
    assert long_path_remedy(short) == ""
    assert long_path_remedy(PermissionError(13, "no", error.filename)) == ""


@pytest.fixture
def closed(tmp_path):
    """A folder that this process may not enter."""
    if not hasattr(os, "seteuid"):
        pytest.skip("Windows has other permissions")
    folder, user = tmp_path / "closed", os.geteuid()
    folder.mkdir()
    (folder / "file").touch()
    folder.chmod(0)
    if user == 0:
        os.seteuid(65534)  # permissions do not stop root
    yield folder
    if user == 0:
        os.seteuid(user)
    folder.chmod(0o700)


def test_folder_and_file_behind_a_closed_folder(closed):
    assert "Permission denied): change its permissions" in why_not_writable(closed / "run")


def test_nearest_existing(tmp_path, monkeypatch):
    assert nearest_existing(tmp_path) == tmp_path
    assert nearest_existing(str(tmp_path / "a" / "b")) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert nearest_existing("a/b") == tmp_path
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    with pytest.raises(UserError, match=r"X:.* is on a drive or server that is not there: connect it"):
        nearest_existing("X:/a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "Expecting"),
        (b" " * (2**24 + 1), "larger than 16 MiB"),
        (b'[{"a": 1, "b": 2, "a": 1}]', 'the key "a" twice: remove one'),
        (b'"\xff"', "line 1 is not UTF-8: save it as UTF-8"),
    ],
)
def test_unusable_json_is_a_value_error(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_json(tmp_path / "a.json")


def test_json_lines_that_are_no_objects_are_skipped(tmp_path):
    lines = ['{"a": 1}', "[1]", "{torn", "", '{"a": 2}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert list(read_json_lines(tmp_path / "a.jsonl")) == [{"a": 1}, {"a": 2}]


def test_new_and_empty_folders_are_claimed_once(tmp_path):
    for folder in (tmp_path / "new" / "inner", tmp_path / "empty"):
        assert check_folder(folder, "train") is None
        assert not (folder / MARKER_NAME).exists()
        marker = claim_folder(folder, "train")
        (folder / "more.txt").write_text("of the command")
        assert claim_folder(folder, "train") == check_folder(folder, "train") == read_marker(folder) == marker
        assert len(marker.id) == 16


def test_what_a_file_browser_leaves_does_not_count(tmp_path):
    (tmp_path / ".DS_Store").touch()
    (tmp_path / "Thumbs.db").touch()
    (tmp_path / ".vae-probe-0123").touch()  # of a claim that was killed
    assert claim_folder(tmp_path, "train").command == "train"


def test_a_folder_of_results_may_become_one(tmp_path):
    """As ./outputs after the demo, which is in ./outputs/demo."""
    claim_folder(tmp_path / "demo", "train")
    assert claim_folder(tmp_path, "train").id != read_marker(tmp_path / "demo").id


def test_folders_of_others_are_refused(tmp_path):
    claim_folder(tmp_path / "shards", "shard")
    with pytest.raises(UserError, match=r"--output_dir .*shards is the folder of another command \(shard\)"):
        claim_folder(tmp_path / "shards", "train")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    with pytest.raises(UserError, match=r"did not write \(a.jpg\): give a new or an empty folder"):
        claim_folder(tmp_path / "photos", "train")
    assert os.listdir(tmp_path / "photos") == ["a.jpg"]
    with pytest.raises(UserError, match=r"--out .*is a file"):
        claim_folder(tmp_path / "photos" / "a.jpg", "train", "--out")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"command": 1, "id": "a"}', "{" * 5000])
def test_a_damaged_marker_makes_no_folder_ours(tmp_path, content):
    (tmp_path / MARKER_NAME).write_text(content)
    assert read_marker(tmp_path) is None
    (tmp_path / "a.jpg").touch()
    with pytest.raises(UserError, match=r"a\.jpg"):
        claim_folder(tmp_path, "train")
    (tmp_path / "a.jpg").unlink()
    assert claim_folder(tmp_path, "train") == read_marker(tmp_path)  # a killed claim left it


def test_one_of_many_processes_claims_a_folder(tmp_path):
    with ThreadPool(8) as pool:
        markers = pool.map(lambda _: claim_folder(tmp_path / "run", "train"), range(16))
    assert len(set(markers)) == 1
