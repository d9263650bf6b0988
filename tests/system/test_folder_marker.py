"""A command writes only into a new or empty folder, or into its own."""

import os
from multiprocessing.pool import ThreadPool

import pytest

from vae.system.errors import UserError
from vae.system.folder_marker import MARKER_NAME, check_folder, claim_folder, read_marker


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
