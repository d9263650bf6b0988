"""--exclude finds images by each of their keys; validation images that are training images are found."""

import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.harness.image_kinds import detailed, encoded
from tests.harness.runs import TINY
from tests.harness.shards import pack
from tests.harness.tars import images_of, write_img2dataset
from tests.harness.training_runs import SHORT, assert_same, last_checkpoint, records
from vae.config.options import DataConfig, build
from vae.config.trained_vae_flags import EvaluateConfig
from vae.data import image_sets
from vae.data.dataset import CropDataset, FolderImages
from vae.data.exclude_list import Excluded, read_exclude_list, refuse_unmatched
from vae.data.image_sets import NotComparedError, find_excluded, find_shared_images
from vae.data.loading import TrainLoader
from vae.evaluation.image_set import find_images
from vae.images.folder import list_images
from vae.interop.run_files import OTHER_DATA
from vae.shards.dataset_json import Shard, index_path, index_type, read_dataset, write_dataset
from vae.shards.shard_images import ShardImages
from vae.system.errors import DataError, UserError
from vae.training import datasets
from vae.training.provenance import EXACT
from vae.training.run import train

COUNT = 12  # images of a folder, and of a dataset of shards


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_index(folder: Path, tar: Path, name: str, rows: np.ndarray) -> Shard:
    path = index_path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, rows)
    return Shard(name, len(rows), tar.stat().st_size, sha256(tar.read_bytes()), sha256(path.read_bytes()))


def own_dataset(folder: Path, files: dict[str, bytes]) -> Path:
    """Two shards of KEY.png and KEY.json, in the layout of --mode shard."""
    shards = []
    for number in range(2):
        tar_path, rows = folder / f"images-{number:06}.tar", []
        with tarfile.open(tar_path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for name, data in list(files.items())[number::2]:
                key = sha256(data)[:32]
                texts = json.dumps({"source": name, "url": f"https://x/{name}?a=1"}).encode()
                for member, content in ((f"{key}.png", data), (f"{key}.json", texts)):
                    info = tarfile.TarInfo(member)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
                text = tar.offset - 2 * 512
                offset = text - -(-len(data) // 512) * 512
                rows.append((key, offset, len(data), 0, 64, 64, text, tar.offset, key))
        shards.append(write_index(folder, tar_path, tar_path.name, np.array(rows, index_type(32))))
    write_dataset(folder / "dataset.json", shards, {}, None)
    return folder / "dataset.json"


def foreign_dataset(folder: Path) -> Path:
    """Tar files of img2dataset with an index, in the layout of --mode index."""
    shards = []
    for path in sorted(write_img2dataset(folder / "tars").glob("*.tar")):
        found, ends = [], {}
        with tarfile.open(path) as tar:
            for member in tar:
                ends[member.name.partition(".")[0]] = member.offset_data + -(-member.size // 512) * 512
                if member.name.endswith(".jpg"):
                    found.append(member)
            rows = [
                (
                    *(sha256(tar.extractfile(one).read())[:32], one.offset_data, one.size, 0, 64, 64),
                    *(one.offset, ends[one.name.partition(".")[0]], one.name),
                )
                for one in found
            ]
        shards.append(write_index(folder / "indexes", path, path.name, np.array(rows, index_type(32))))
    more = {"tars": str(folder / "tars"), "indexes": "indexes"}
    write_dataset(folder / "dataset.json", shards, {}, None, more=more)
    return folder / "dataset.json"


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return {f"a/{number:02}.png": encoded(detailed(number), "PNG") for number in range(COUNT)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("folder")
    rows = []
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
        rows.append({"path": name, "sha256": sha256(data)})
    (folder / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def own(tmp_path_factory, files):
    return own_dataset(tmp_path_factory.mktemp("own"), files)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    return foreign_dataset(tmp_path_factory.mktemp("foreign"))


def write_list(path: Path, *keys: str) -> str:
    (path / "list.txt").write_text("".join(f"{key}\n" for key in keys))
    return str(path / "list.txt")


def names_of(images, tmp_path, *keys, manifest=None) -> list[str]:
    """The names of the images that these keys exclude; three processes find the same together."""
    listed = read_exclude_list(write_list(tmp_path, *keys))
    indices = find_excluded(images, listed, manifest)
    shares = [find_excluded(images, listed, manifest, rank, 3) for rank in range(3)]
    assert np.unique(np.concatenate(shares)).tolist() == indices.tolist()
    return [images.name(index) for index in indices.tolist()]


def test_files_are_found_by_name_and_hash(folder, files, tmp_path):
    images, data = FolderImages(folder, list(files)), files["a/03.png"]
    keys = ["a/01.png", "./a/02.png", sha256(data).upper(), f"{sha256(files['a/04.png'])}  photo.png"]
    assert names_of(images, tmp_path, *keys, "a/99.png", "") == [f"a/{n:02}.png" for n in (1, 2, 3, 4)]
    assert names_of(images, tmp_path, sha256(data)[:32]) == ["a/03.png"]


def test_manifest_gives_hashes(folder, files, tmp_path):
    images = FolderImages("nowhere", list(files))  # no file is read
    keys = ["a/01.png", sha256(files["a/04.png"])]
    found = names_of(images, tmp_path, *keys, manifest=str(folder / "manifest.jsonl"))
    assert found == ["a/01.png", "a/04.png"]


def test_shards_are_found_by_hash_and_name(own, files, tmp_path, monkeypatch):
    images = ShardImages([read_dataset(own)], 1)
    key = {name: sha256(data)[:32] for name, data in files.items()}
    keys = [sha256(files["a/00.png"]), f"images-000001.tar/{key['a/03.png']}", "images-000000.tar/no"]
    found = names_of(images, tmp_path, *keys)
    assert sorted(name.rpartition("/")[2] for name in found) == sorted(key[f"a/{n:02}.png"] for n in (0, 3))
    read = []
    monkeypatch.setattr(ShardImages, "rows", lambda self, number: read.append(number) or self._index(number))
    assert names_of(images, tmp_path, f"images-000001.tar/{key['a/03.png']}")
    assert set(read) == {1}  # no other index is needed for a name


def test_tars_of_others_are_found_by_member(foreign, tmp_path):
    images, data = ShardImages([read_dataset(foreign)], 1), images_of(foreign.parent / "tars" / "00001.tar")
    found = names_of(images, tmp_path, "00000.tar/000000003.jpg", sha256(data["00001.tar/000000012.jpg"]))
    assert found == ["00000.tar/000000003.jpg", "00001.tar/000000012.jpg"]
    assert names_of(images, tmp_path, "000000003.jpg") == []  # a name of many tar files


def test_several_datasets_are_all_searched(own, foreign, files, tmp_path):
    images = ShardImages([read_dataset(path) for path in (own, foreign)], 1)
    keys = [sha256(files["a/05.png"]), "00001.tar/000000019.jpg"]
    found = names_of(images, tmp_path, *keys)
    assert [name.startswith(str(path)) for name, path in zip(found, (own, foreign), strict=True)] == [
        True
    ] * 2
    assert names_of(images, tmp_path, *found) == found  # as messages print them


def test_only_the_places_of_excluded_images_are_empty(folder, files):
    images = FolderImages(folder, list(files))

    def batches(excluded: Excluded) -> list[tuple[list[int], int]]:
        crops = CropDataset(images, DataConfig(), image_size=32, excluded=excluded)
        with TrainLoader(crops, local_batch=4) as loader:
            return [(batch.indices.tolist(), batch.excluded) for batch in loader.batches(1)]

    left_out = {2, 3, 7}
    expected = [
        ([i for i in batch if i not in left_out], len(left_out & {*batch}))
        for batch, _ in batches(Excluded())
    ]
    assert batches(Excluded(np.array(sorted(left_out)))) == expected
    assert sum(count for _, count in expected) == 3


@pytest.mark.parametrize(
    ("line", "example"), [("b/0.png", "b/0.png"), (f"{7:064x}", 32 * "0"), ("", "no line")]
)
def test_a_list_of_no_image_is_refused_with_an_example(line, example, tmp_path):
    with pytest.raises(UserError, match=rf"--exclude .*list\.txt.*{example}.*omit the flag"):
        refuse_unmatched(read_exclude_list(write_list(tmp_path, line)))


def test_list_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"--exclude .* cannot be read"):
        read_exclude_list(str(tmp_path / "none.txt"))
    assert not read_exclude_list(write_list(tmp_path)).names
    monkeypatch.setattr("vae.data.exclude_list.MAX_BYTES", 2**20)
    (tmp_path / "list.txt").write_bytes(bytes(2**20 + 1))
    with pytest.raises(UserError, match="larger than 1 MiB"):
        read_exclude_list(str(tmp_path / "list.txt"))


def test_evaluation_leaves_out_excluded_images(folder, files, tmp_path, capsys):
    config = {"vae": ("x",), "data_path": (str(folder),), "output_dir": "x", "sizes": (32,)}
    listed = write_list(tmp_path, sha256(files["a/00.png"]), "a/06.png", "nothing")
    found, _ = find_images(EvaluateConfig(**config, exclude=listed))
    assert found.names == [name for name in files if name not in ("a/00.png", "a/06.png")]
    assert "2 images are left out\n" in capsys.readouterr().out
    found, _ = find_images(EvaluateConfig(**config, exclude=listed, max_images=4))
    assert found.names == ["a/03.png", "a/09.png"]  # its choice does not depend on the list
    with pytest.raises(DataError, match="has all 12 images"):
        find_images(EvaluateConfig(**config, exclude=write_list(tmp_path, *files)))


def test_run_with_every_image_excluded_is_one_line(tiny, tmp_path):
    names = [
        path.relative_to(tiny["data_path"]).as_posix() for path in Path(tiny["data_path"]).rglob("*.png")
    ]
    with pytest.raises(DataError, match=r"--exclude .* has all 12 training images"):
        train({**tiny, "exclude": write_list(tmp_path, *names)})


@pytest.mark.slow
def test_run_with_a_list_is_the_run_without_these_images(image_folder, tmp_path, capsys):
    """The excluded image of one run is unreadable in the other: the weights are the same."""
    given = {**TINY, **SHORT, "data_path": str(image_folder), "val_split": 0.25}
    given |= {"num_epochs": 2, "max_bad_fraction": 0.5}
    split = tmp_path / "first"
    assert train({**given, "max_steps": 1, "output_dir": str(split)}) == 0
    names = json.loads((split / "split.json").read_text())
    gone = [names["train"][3], names["validation"][1]]
    damaged = tmp_path / "damaged"
    for path in image_folder.rglob("*.png"):
        name = path.relative_to(image_folder).as_posix()
        (damaged / name).parent.mkdir(parents=True, exist_ok=True)
        (damaged / name).write_bytes(b"" if name in gone else path.read_bytes())
    listed = write_list(tmp_path, *gone, "nothing")
    assert train({**given, "exclude": listed, "output_dir": str(tmp_path / "one")}) == 0
    assert "1 training and 1 validation images are left out\n" in capsys.readouterr().out
    assert train({**given, "data_path": str(damaged), "output_dir": str(tmp_path / "other")}) == 0
    one, other = (last_checkpoint(tmp_path / name) for name in ("one", "other"))
    for key in ("model", "ema", "position"):
        assert_same(one[key], other[key], key)
    assert (
        records(tmp_path / "one", "validation")[-1]["psnr"]
        == records(tmp_path / "other", "validation")[-1]["psnr"]
    )
    found = json.loads((tmp_path / "one" / "split.json").read_text())
    assert found == {part: [name for name in names[part] if name not in gone] for part in names}
    training = one["provenance"]["training"]
    assert training["exclude"] == sha256(Path(listed).read_bytes())
    assert training["images"] == 12


@pytest.mark.slow
def test_resumed_run_says_that_the_list_is_another_one(tiny, tmp_path, capsys):
    listed = write_list(tmp_path, "image_00.png")
    assert train({**tiny, "exclude": listed, "max_steps": 1}) == 0
    resumed = {"output_dir": tiny["output_dir"], "resume_from": "latest", "device": "cpu"}
    assert train({**resumed, "max_steps": 2}) == 0  # the checkpoint has the path of the list
    write_list(tmp_path, "image_00.png", "image_02.png")
    assert train({**resumed, "max_steps": 3}) == 0
    assert "training exclude" in capsys.readouterr().out
    assert [run["resume"] for run in records(Path(tiny["output_dir"]), "run")] == ["new", EXACT, OTHER_DATA]


# ---- Images of both sets -----------------------------------------------------------------------------------


def shared(train, validation, exclude=None):
    return find_shared_images(opened(train), opened(validation), exclude)


def opened(path):
    if str(path).endswith(".json"):
        return ShardImages([read_dataset(path)], None)
    return FolderImages(path, list_images(path))


@pytest.fixture
def data(image_folder, tmp_path):
    """A folder with 8 images, and 8 more in its folder `inner`."""
    return shutil.copytree(image_folder, tmp_path / "data")


def test_one_folder_in_another_by_any_path(data, tmp_path):
    paths = [(data, data / "inner", 8), (data / "inner", data, 8), (data, data, 16)]
    paths += [(data, data.parent / "data" / "inner" / ".." / "inner", 8)]
    if sys.platform == "win32":
        paths += [(data, data.parent / "DATA" / "INNER", 8)]
    else:
        (tmp_path / "all").symlink_to(data)
        (tmp_path / "more").mkdir()
        (tmp_path / "more" / "linked").symlink_to(data / "inner")
        paths += [(tmp_path / "all", data / "inner", 8), (data, tmp_path / "more", 8)]
    for train_path, validation, count in paths:
        pairs = shared(train_path, validation)
        assert len(pairs) == count, (train_path, validation)
        assert all(os.path.samefile(validation / ours, train_path / theirs) for ours, theirs in pairs)


def test_copies_and_hard_links_with_other_names(data, other_images, tmp_path):
    validation = shutil.copytree(other_images, tmp_path / "val")
    assert shared(data, validation) == []
    shutil.copy(data / "image_00.png", validation / "copy.jpg")
    os.link(data / "inner" / "image_01.png", validation / "link.png")
    assert shared(data, validation) == [("copy.jpg", "image_00.png"), ("link.png", "inner/image_01.png")]


def test_excluded_training_images_are_not_shared(data, tmp_path):
    names = sorted(f"inner/{path.name}" for path in (data / "inner").iterdir())
    (tmp_path / "exclude.txt").write_text("\n".join(names[1:]))
    exclude = read_exclude_list(str(tmp_path / "exclude.txt"))
    assert shared(data, data / "inner", exclude) == [(names[0].removeprefix("inner/"), names[0])]


def test_folders_and_shards(data, tmp_path):
    dataset = pack(data, tmp_path / "set", val_split=0.0)
    for train_path, validation, count in ((dataset, data / "inner", 8), (data / "inner", dataset, 8)):
        assert len(shared(train_path, validation)) == count


def test_sets_that_take_minutes_are_not_compared_and_the_same_folder_is(data, other_images, monkeypatch):
    monkeypatch.setattr(image_sets, "MAX_FILES", 15)
    with pytest.raises(NotComparedError, match="has 16 images"):
        shared(data, other_images)
    assert len(shared(data, data / "inner")) == 8
    monkeypatch.undo()
    monkeypatch.setattr(image_sets, "MAX_BYTES", 100)
    with pytest.raises(NotComparedError, match="GiB of files have equal sizes"):
        shared(data, shutil.copytree(data, data.with_name("copy")))


def test_training_refuses_them_with_examples(data):
    config = build({"data_path": str(data), "val_path": str(data / "inner")})
    with pytest.raises(
        DataError, match=r"--val_path .*8 of its 8 images are training .*image_01\.png \(inner/"
    ):
        datasets.find_images(config)
