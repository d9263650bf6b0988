"""Labels of a probe: from CSV files and manifests, in folds that keep groups together; one-line mistakes."""

import numpy as np
import pytest

from tests.harness.preparing import write_manifest
from vae.config.evaluate_flags import EvaluateConfig
from vae.probe.labels import folds_of, read_sets
from vae.system.errors import DataError, UserError

NAMES = [f"{number:02d}.png" for number in range(24)]


@pytest.fixture
def read(tmp_path):
    """The classes, the labelled images and their folds, from the rows of a file with labels."""
    (tmp_path / "images").mkdir()
    for name in NAMES:
        (tmp_path / "images" / name).touch()

    def from_rows(rows, header="path,label", num_folds=3, column="label"):
        path = tmp_path / ("labels.csv" if header else "labels.jsonl")
        if header:
            path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
        else:
            write_manifest(path, rows)
        images = (str(tmp_path / "images"),)
        config = EvaluateConfig(("v",), images, "o", probe=str(path), probe_column=column)
        classes, (labelled,) = read_sets(config)
        return classes, labelled, folds_of(labelled, classes, f"--probe {path}", num_folds)

    return from_rows


def test_folds_keep_groups_together_and_classes_balanced(read):
    rows = [f"{name},{'ab'[n // 2 % 2]},{n // 2}" for n, name in enumerate(NAMES)]  # pairs are groups
    classes, labelled, folds = read(rows, "id,label,group")
    assert classes == ["a", "b"]
    assert (folds[::2] == folds[1::2]).all()
    for fold in range(3):
        assert np.bincount(labelled.targets[folds == fold]).tolist() == [4, 4]


def test_manifest_columns_and_its_folds_are_used(read):
    rows = [
        {"path": name, "sha256": "0", "site": "ab"[n % 2], "label": None, "group": str(n), "fold": n // 2 % 4}
        for n, name in enumerate(NAMES)
    ]
    _, _, folds = read(rows, "", 5, "site")
    assert folds.tolist() == [n // 2 % 4 for n in range(24)]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators_of_the_csv_files_of_a_split_are_read(read, separator):
    rows = [f"{name}{separator}{'ab'[n % 2]}" for n, name in enumerate(NAMES)]
    assert read(rows, f"path{separator}label")[1].targets.tolist() == [n % 2 for n in range(24)]


def test_some_folds_are_replaced_by_new_ones_and_reported(read, capsys):
    rows = [f"{name},{'ab'[n % 2]},{n % 3 if n else ''}" for n, name in enumerate(NAMES)]
    assert read(rows, "path,label,fold", 4)[2].max() == 3
    assert "23 of 24 images have a fold" in capsys.readouterr().out


def test_equal_images_of_a_manifest_are_one_group(read):
    """Also if the number of a group is 0."""
    rows = [
        {"path": name, "sha256": str(n // 2), "label": "ab"[n // 2 % 2], "group": 0 if n > 21 else None}
        for n, name in enumerate(NAMES)
    ]
    _, labelled, _ = read(rows, "")
    assert (labelled.groups[::2] == labelled.groups[1::2]).all()
    assert len(set(labelled.groups.tolist())) == 12


def test_images_without_label_are_left_out(read):
    rows = [f"{name},{'ab'[n % 2]}" for n, name in enumerate(NAMES[:12])] + ["20.png,"]
    assert read(rows)[1].names(np.arange(12)) == NAMES[:12]


@pytest.mark.parametrize(
    ("rows", "header", "tokens"),
    [
        (["other.png,a", "00.png,b"], "path,label", ("other.png", "1 of its 2", "--data_path")),
        (["00.png,a", "01.png,a"], "path,label", ("only the class a", "two classes")),
        ([], "path,label", ("no labels",)),
        (["00.png,a", "00.png,b"], "path,label", ("00.png", "twice")),
        (["00.png,a"], "path,kind", ("column label", "path, kind", "--probe_column")),
        (["00.png|a"], "path|label", ("column label", "path|label", "filename")),
        (
            [f"{n},{'a' if i < 2 else 'b'}" for i, n in enumerate(NAMES)],
            "path,label",
            ("class a", "2 groups", "--probe_folds 3", "lower --probe_folds to 2"),
        ),
        (
            [f"{n},{'a' if i < 1 else 'b'}" for i, n in enumerate(NAMES)],
            "path,label",
            ("class a", "1 groups", "remove the class"),
        ),
        (
            [f"{n},{'ab'[i % 2]},g,{i % 3}" for i, n in enumerate(NAMES)],
            "path,label,group,fold",
            ("00.png", "01.png", "one group", "different folds"),
        ),
        (
            [f"{n},{'a' if i % 4 == 0 else 'b'},{i},{i % 4}" for i, n in enumerate(NAMES)],
            "path,label,group,fold",
            ("class a", "in one fold", "add images"),
        ),
        (["00.png,a", ",b"], "path,label", ("line 3", "no path")),
        (["a,00.png", "b"], "label,path", ("line 3", "1 values for 2 columns")),
    ],
)
def test_mistakes_are_one_line(read, rows, header, tokens):
    with pytest.raises((DataError, UserError)) as caught:
        read(rows, header)
    message = str(caught.value)
    assert "\n" not in message
    assert all(token in message for token in tokens)
