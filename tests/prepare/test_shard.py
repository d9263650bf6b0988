"""--mode shard: original bytes in WebDataset layout, resumable, the same everywhere, and verifiable."""

import io
import json
import tarfile

import pytest

from tests.harness.image_kinds import detailed, encoded
from tests.harness.preparing import prepare, shard
from tests.harness.runs import run_script
from tests.harness.shards import pack
from vae.prepare import shard as shard_module
from vae.prepare.blocks import FileBlock
from vae.shards.dataset_json import read_dataset
from vae.system.errors import DataError


@pytest.fixture
def source(tmp_path):
    """30 images, a copy of one, a damaged file, and a manifest with captions."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02}.png").write_bytes(encoded(detailed(seed=number), "PNG"))
    (folder / "copy.png").write_bytes((folder / "00.png").read_bytes())
    (folder / "cut.png").write_bytes((folder / "01.png").read_bytes()[:500])
    rows = [{"path": f"{n:02}.png", "sha256": "", "caption": f"text {n}"} for n in range(30)]
    (folder / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def files(folder):
    names = (".tar", ".npy", ".json")
    return {p.name: p.read_bytes() for p in folder.glob("[!.]*") if p.suffix in names}


def members(folder):
    """(name, bytes) of all members of all shards."""
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                yield member.name, tar.extractfile(member).read()


def test_shards_have_the_original_bytes_and_the_metadata(source, tmp_path):
    words = ("--mode", "shard", "--input_dir", str(source), "--output_dir", str(tmp_path / "set"))
    done = run_script(
        "prepare_data.py", *words, "--shard_mb", "1", "--val_split", "0.1", "--num_workers", "1"
    )
    assert done.returncode == 0, done.stderr
    assert "27 images for training and 3 for validation" in done.stdout
    assert "1 exact duplicate" in done.stdout
    assert "truncated" in done.stdout
    found = list(members(tmp_path / "set"))
    originals = {data for name, data in found if not name.endswith(".json")}
    assert originals == {(source / f"{number:02}.png").read_bytes() for number in range(30)}
    captions = {json.loads(data)["caption"] for name, data in found if name.endswith(".json")}
    assert len(captions) == 30
    dataset = read_dataset(tmp_path / "set" / "dataset.json")
    assert (dataset.samples, dataset.validation) == (27, "validation.json")


def test_images_of_shards_are_validated_in_their_tar_files(source, tmp_path):
    shard(source, tmp_path / "set", code=0)
    words = ("--input_dir", tmp_path / "set", "--output_file", tmp_path / "report.json", "--overwrite")
    prepare("--mode", "validate", *words, code=0, says="30 accepted, 0 rejected")
    path = tmp_path / "set" / "images-000000.tar"
    with tarfile.open(path) as tar:
        image = next(member for member in tar if member.name.endswith("png"))
    data = bytearray(path.read_bytes())
    data[image.offset_data + image.size // 2] ^= 1
    path.write_bytes(data)
    prepare("--mode", "validate", *words, "--strict", code=77, says="29 accepted, 1 rejected")


def test_shards_are_the_same_from_every_folder_and_after_a_stop(source, tmp_path):
    """Shards of at most 20 kB; the second dataset lacks a shard, its file of JSON and some rows."""
    results = {}
    for name in ("one", "two"):
        folder = tmp_path / name
        pack(source, folder, 20_000, val_split=0.05)
        if name == "two":
            (folder / "dataset.json").unlink()  # as if it had stopped before its end
            (folder / "images-000001.tar").unlink()
            next((folder / ".prepare/rows").iterdir()).unlink()
            (folder / "images-000000.tar").write_bytes(b"half a shard")
            pack(source, folder, 20_000, val_split=0.05)
        results[name] = files(folder)
    assert results["one"] == results["two"]
    assert len(results["one"]) > 6


def test_dataset_never_changes(source, tmp_path):
    shard(source, tmp_path / "set", code=0)
    before = files(tmp_path / "set")
    shard(source, tmp_path / "set", code=0)
    (source / "05.png").unlink()
    again = shard(source, tmp_path / "set")
    assert again.returncode != 0
    assert "--output_dir" in again.stderr
    assert "new folder" in again.stderr
    assert files(tmp_path / "set") == before


def test_manifest_that_is_split_decides(source, tmp_path):
    rows = [json.loads(line) for line in (source / "manifest.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["split"] = "val" if number in (4, 7) else "train"
    (source / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (source / "copy.png").unlink()
    shard(source, tmp_path / "set", "--val_split", "0.5", code=0)
    held = {data for name, data in members(tmp_path / "set") if name.endswith("png")}
    with tarfile.open(tmp_path / "set" / "validation-000000.tar") as tar:
        found = {tar.extractfile(m).read() for m in tar if m.name.endswith("png")}
    assert found == {(source / "04.png").read_bytes(), (source / "07.png").read_bytes()} < held


def test_image_that_changed_after_its_check_is_an_error(source, tmp_path):
    block = FileBlock(id="", file=source, names=("00.png",))
    member = shard_module.Member(0, 0, 0, 64 * "0", "png", 1, (1, 1), "{}")
    plan = shard_module.Plan("dataset.json", "images-000000.tar", [member], {0: block})
    with pytest.raises(DataError, match="has changed"):
        shard_module.write_shard(tmp_path, plan)
    assert not list(tmp_path.glob("*.tar"))


# ---- Other programs ----------------------------------------------------------------------------------------


def test_shards_have_the_bytes_that_tarfile_writes(source, tmp_path):
    folder = pack(source, tmp_path / "set", shard_bytes=30_000).parent
    for path in folder.glob("*.tar"):
        expected = io.BytesIO()
        with (
            tarfile.open(path) as given,
            tarfile.open(fileobj=expected, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            for member in given:
                info = tarfile.TarInfo(member.name)
                info.size = member.size
                tar.addfile(info, given.extractfile(member))
        assert path.read_bytes() == expected.getvalue()


def test_webdataset_reads_the_shards(source, tmp_path):
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    folder = pack(source, tmp_path / "set", shard_bytes=30_000).parent
    urls = [f"file:{path}" for path in folder.glob("*.tar")]
    found = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert all(json.loads(sample["json"])["key"] == sample["__key__"] for sample in found)
    assert {sample["png"] for sample in found} == {(source / f"{n:02}.png").read_bytes() for n in range(30)}
