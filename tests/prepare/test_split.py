"""No group is in two subsets, labels keep their share, subsets are stable, mistakes are one-line errors."""

import json
import random
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from tests.harness.preparing import prepare, write_manifest
from vae.config.prepare_flags import SplitConfig
from vae.data.manifest import read_rows
from vae.prepare.demo import draw_image
from vae.prepare.split import run_split
from vae.prepare.subsets import choose_val_groups, gather
from vae.system.errors import DataError, UserError


def make_rows(count, *, seed=0, groups=True, labels=0, first=0):
    """Rows as preprocess writes them: groups of one to five, labels with unequal frequencies."""
    chance = random.Random(seed)
    rows, group, left = [], 0, 0
    for number in range(first, first + count):
        if left == 0:
            group, left, label = number, chance.randint(1, 5), int(labels * chance.random() ** 2)
        left -= 1
        rows.append(
            {
                "path": f"s{number % 7}/{number:07d}.jpg",
                "sha256": f"{chance.getrandbits(256):064x}",
                "width": 64,
                "height": 48,
                "source": f"s{number % 7}/{number:07d}.png",
                "flags": [],
                "group": f"g{group}" if groups else None,
                "label": f"l{label}" if labels else None,
            }
        )
    return rows


def split(folder, **options):
    """Split, and return the counts of the subsets, of the folds and of each label's share in validation."""
    given = {
        name: (str(value),) if name in ("join", "label_by") else value for name, value in options.items()
    }
    run_split(SplitConfig(input_dir=str(folder), **given))
    rows = list(read_rows(folder / "manifest.jsonl"))
    folds = Counter(row["fold"] for row in rows if row["fold"] is not None)
    of_label = {label: [row["split"] == "val" for row in rows if row["label"] == label]
                for label in {row["label"] for row in rows}}  # fmt: skip
    return {
        **Counter(row["split"] for row in rows),
        "folds": [folds[fold] for fold in sorted(folds)],
        "labels": {label: sum(val) / len(val) for label, val in of_label.items()},
    }


def subsets_of(folder):
    return {row["path"]: (row["split"], row["fold"]) for row in read_rows(folder / "manifest.jsonl")}


def check_groups(folder):
    seen = {}
    for row in read_rows(folder / "manifest.jsonl"):
        place = row["split"], row["fold"]
        assert seen.setdefault(row["group"] or row["sha256"], place) == place


@pytest.mark.parametrize("labels", [0, 8])
def test_groups_stay_together_and_labels_keep_their_share(tmp_path, labels):
    write_manifest(tmp_path / "manifest.jsonl", make_rows(4_000 if labels else 20_000, labels=labels))
    report = split(tmp_path, val_split=0.1)
    check_groups(tmp_path)
    for share in report["labels"].values():
        assert abs(share - 0.1) <= 0.01
    assert len(report["labels"]) == max(labels, 1)


def test_without_labels_the_subsets_of_many_groups_never_change(tmp_path):
    rows = make_rows(6_000)
    write_manifest(tmp_path / "manifest.jsonl", rows)
    split(tmp_path, val_split=0.05, num_folds=4)
    before = subsets_of(tmp_path)
    more = rows + make_rows(600, seed=5, first=6_000)
    random.Random(1).shuffle(more)
    write_manifest(tmp_path / "manifest.jsonl", more)
    split(tmp_path, val_split=0.05, num_folds=4)
    after = subsets_of(tmp_path)
    assert {name: after[name] for name in before} == before


def test_second_run_changes_no_byte(tmp_path):
    write_manifest(tmp_path / "manifest.jsonl", make_rows(300, labels=3))
    split(tmp_path, val_split=0.2, seed=3)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = split(tmp_path, val_split=0.3)
    assert abs(other["val"] / 300 - 0.3) < 0.02
    split(tmp_path, val_split=0.2, seed=3)
    assert files == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_folds_contain_every_image_outside_the_validation_set(tmp_path):
    write_manifest(tmp_path / "manifest.jsonl", make_rows(5_000))
    report = split(tmp_path, num_folds=5)
    assert sum(report["folds"]) == 5_000
    assert all(abs(count - 1000) < 150 for count in report["folds"])
    assert all((fold == 0) == (subset == "val") for subset, fold in subsets_of(tmp_path).values())
    report = split(tmp_path, num_folds=5, val_split=0.1)
    assert sum(report["folds"]) == report["train"]
    assert all((fold is None) == (subset == "val") for subset, fold in subsets_of(tmp_path).values())
    check_groups(tmp_path)


def test_small_sets_validate_on_at_least_one_image_and_never_all():
    for count, share in ((2, 0.01), (2, 0.9), (10, 0.1), (40, 0.05)):
        keys = np.random.default_rng(count).integers(0, 2**63, count, dtype=np.uint64)
        groups = gather(keys)
        in_val = choose_val_groups(groups, share)
        assert in_val.sum() == min(max(1, round(count * share)), count - 1)
        assert in_val[: in_val.sum()].all()  # the lowest hashes


def test_folders_and_columns_as_groups(tmp_path):
    rows = make_rows(700, groups=False)
    write_manifest(tmp_path / "manifest.jsonl", rows)
    split(tmp_path, group_by="folder:1", val_split=0.2)
    subsets = subsets_of(tmp_path)
    assert len({(name.split("/")[0], subset) for name, subset in subsets.items()}) == 7
    lines = ["path;site;animal"]  # of the original folder
    lines += [f"{row['source']};site {i % 20};{('dog', 'cat')[i // 20 % 2]}" for i, row in enumerate(rows)]
    table = tmp_path / "table.csv"
    table.write_text("\ufeff" + "\n".join(lines))
    report = split(tmp_path, group_by="site", label_by="animal", join=table, val_split=0.2)
    found = list(read_rows(tmp_path / "manifest.jsonl"))
    assert [row["group"] for row in found] == [f"site {i % 20}" for i in range(700)]
    assert [row["label"] for row in found] == ["dog" if i // 20 % 2 == 0 else "cat" for i in range(700)]
    assert report["val"] == 140
    check_groups(tmp_path)
    prepared = [{"file": ".\\" + row["path"].replace("/", "\\"), "site": i % 9} for i, row in enumerate(rows)]
    (tmp_path / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prepared))
    table_options = {"group_by": "site", "join": tmp_path / "table.jsonl", "join_on": "file"}
    split(tmp_path, **table_options, label_by="manifest", val_split=0.2)
    found = list(read_rows(tmp_path / "manifest.jsonl"))
    assert [row["group"] for row in found] == [str(i % 9) for i in range(700)]
    path = rows[-1]["path"]
    for text, by, word in (
        ("\n".join([*lines[:-1], f"{path};;cat"]), "site", path),  # it has no value
        ("path;site;animal\nx/y.png;x;cat", "site", "x/y.png"),
        ("\n".join([*lines, f"{rows[0]['source']};x;cat"]), "site", "s0/0000000.png"),  # it has two
        ("\n".join(lines), "sit", "--group_by sit: "),
        ("file\nx\n", "site", "--join_on path: "),
    ):
        table.write_text(text)
        with pytest.raises(UserError, match=word):
            split(tmp_path, group_by=by, label_by="manifest", join=table, join_on="path")
    with pytest.raises(UserError, match=r"--join .*none.csv"):
        split(tmp_path, group_by="site", join=tmp_path / "none.csv")


def test_tables_are_joined_in_order_and_columns_of_ones_are_labels(tmp_path):
    """As competitions give features and labels: the second table has no paths, but the ids of the first."""
    rows = make_rows(60, groups=False)
    write_manifest(tmp_path / "manifest.jsonl", rows)
    kinds = ("cat", "dog", "blank")
    (tmp_path / "features.csv").write_text(
        "id,path,site\n" + "".join(f"ZJ{i:04},{row['path']},S{i % 6}\n" for i, row in enumerate(rows))
    )
    ones = ["".join(f",{float(i % 3 == k)}" for k in range(3)) for i in range(60)]
    (tmp_path / "labels.csv").write_text(
        f"id,{','.join(kinds)}\n" + "".join(f"ZJ{i:04}{one}\n" for i, one in enumerate(ones))
    )
    tables = (str(tmp_path / "features.csv"), str(tmp_path / "labels.csv"))
    given = {"input_dir": str(tmp_path), "join": tables, "group_by": "site", "val_split": 0.2}
    run_split(SplitConfig(**given, label_by=kinds))
    found = list(read_rows(tmp_path / "manifest.jsonl"))
    assert [(row["label"], row["group"]) for row in found] == [(kinds[i % 3], f"S{i % 6}") for i in range(60)]
    with pytest.raises(UserError, match="0 of the columns cat, dog"):
        run_split(SplitConfig(**given, label_by=kinds[:2]))
    with pytest.raises(UserError, match=r"--join_on path: .*labels.csv has no such column"):
        run_split(SplitConfig(**{**given, "join": tables[::-1]}, label_by=kinds))


def test_unusable_settings_are_errors(tmp_path):
    write_manifest(tmp_path / "manifest.jsonl", [row | {"group": "one"} for row in make_rows(9)])
    for name, value in (
        *(("num_folds", 1), ("num_folds", 2), ("val_split", 0.1)),
        *(("group_by", by) for by in ("site", "folder:x", "folder:2")),
    ):
        with pytest.raises(UserError, match=f"--{name} {value}"):
            split(tmp_path, **{name: value})


@pytest.fixture
def twins(tmp_path):
    """Eight images, and a smaller copy of four of them, as --mode preprocess writes them."""
    (tmp_path / "raw").mkdir()
    for number in range(8):
        image = Image.fromarray(draw_image(96, 3, number))
        image.save(tmp_path / f"raw/{number}.png")
        if number < 4:
            image.resize((64, 64)).save(tmp_path / f"raw/copy_{number}.jpg", quality=60)
    words = ("--input_dir", tmp_path / "raw", "--output_dir", tmp_path / "twins", "--target_size", 48)
    prepare("--mode", "preprocess", *words, code=0)
    return tmp_path / "twins"


def test_near_duplicates_are_the_default_groups(twins):
    words = ("--mode", "split", "--input_dir", twins, "--val_split", "0.4")
    prepare(*words, code=0, says="12 images in 8 groups by near_duplicates")
    subsets = subsets_of(twins)
    assert all(subsets[f"{number}.jpg"] == subsets[f"copy_{number}.jpg"] for number in range(4))
    assert {subset for subset, _ in subsets.values()} == {"train", "val"}
    groups = [row["group"] for row in read_rows(twins / "manifest.jsonl")]
    assert sorted(map(groups.count, {group for group in groups if group})) == [2, 2, 2, 2]
    prepare(*words[:4], code=0, says="by near_duplicates")  # again, by the hashes
    rows = list(read_rows(twins / "manifest.jsonl"))
    write_manifest(twins / "manifest.jsonl", [*rows[:-1], rows[-1] | {"phash": None}])
    with pytest.raises(DataError, match=r"copy_3.jpg has no phash.*--group_by manifest"):
        split(twins)
