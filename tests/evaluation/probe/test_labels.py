"""Labels of a probe: from CSV files and manifests, in folds that keep groups together; one-line mistakes."""

import numpy as np
import pytest

from vae.data.manifest import write_manifest
from vae.evaluation.probe.labels import read_labels
from vae.system.errors import DataError, UserError

NAMES = [f"{number:02d}.png" for number in range(24)]


def write(path, rows, header="path,label"):
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return str(path)


def test_folds_keep_groups_together_and_classes_balanced(tmp_path):
    rows = [f"{name},{'ab'[n // 2 % 2]},{n // 2}" for n, name in enumerate(NAMES)]  # pairs are groups
    labels = read_labels(write(tmp_path / "l.csv", rows, "id,label,group"), NAMES, "label", 3)
    assert labels.classes == ["a", "b"]
    assert (labels.folds[::2] == labels.folds[1::2]).all()
    for fold in range(3):
        assert np.bincount(labels.targets[labels.folds == fold]).tolist() == [4, 4]


def test_manifest_columns_and_its_folds_are_used(tmp_path):
    rows = [
        {"path": name, "sha256": "0", "site": "ab"[n % 2], "label": None, "group": str(n), "fold": n % 4}
        for n, name in enumerate(NAMES)
    ]
    write_manifest(tmp_path / "m.jsonl", rows)
    labels = read_labels(str(tmp_path / "m.jsonl"), NAMES, "site", 5)
    assert labels.num_folds == 4
    assert labels.folds.tolist() == [n % 4 for n in range(24)]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators_of_the_csv_files_of_a_split_are_read(tmp_path, separator):
    rows = [f"{name}{separator}{'ab'[n % 2]}" for n, name in enumerate(NAMES)]
    labels = read_labels(write(tmp_path / "l.csv", rows, f"path{separator}label"), NAMES, "label", 3)
    assert labels.targets.tolist() == [n % 2 for n in range(24)]


def test_another_separator_is_named(tmp_path):
    with pytest.raises(DataError, match=r"label.*path\|label.*semicolons.*--probe_column"):
        read_labels(write(tmp_path / "l.csv", ["00.png|a"], "path|label"), NAMES, "label", 3)


def test_some_folds_are_replaced_by_new_ones_and_reported(tmp_path, capsys):
    rows = [f"{name},{'ab'[n % 2]},{n % 3 if n else ''}" for n, name in enumerate(NAMES)]
    labels = read_labels(write(tmp_path / "l.csv", rows, "path,label,fold"), NAMES, "label", 4)
    assert labels.num_folds == 4
    assert "23 of 24 images have a fold" in capsys.readouterr().out


def test_equal_images_of_a_manifest_are_one_group(tmp_path):
    """Also if the number of a group is 0."""
    rows = [
        {"path": name, "sha256": str(n // 2), "label": "ab"[n % 2], "group": 0 if n > 21 else None}
        for n, name in enumerate(NAMES)
    ]
    write_manifest(tmp_path / "m.jsonl", rows)
    labels = read_labels(str(tmp_path / "m.jsonl"), NAMES, "label", 3)
    assert (labels.groups[::2] == labels.groups[1::2]).all()
    assert len(set(labels.groups.tolist())) == 12


def test_too_few_images_of_a_class_lower_the_folds_if_that_helps(tmp_path):
    rows = [f"{name},{'a' if n < 4 else 'b'}" for n, name in enumerate(NAMES)]
    with pytest.raises(DataError, match="lower --probe_folds to 4"):
        read_labels(write(tmp_path / "l.csv", rows), NAMES, "label", 5)


def test_images_without_label_are_left_out(tmp_path):
    rows = [f"{name},{'ab'[n % 2]}" for n, name in enumerate(NAMES[:12])] + ["20.png,"]
    assert read_labels(write(tmp_path / "l.csv", rows), NAMES, "label", 3).names == NAMES[:12]


@pytest.mark.parametrize(
    ("rows", "header", "tokens"),
    [
        (["other.png,a", "00.png,b"], "path,label", ("other.png", "1 of its 2", "--data_path")),
        (["00.png,a", "01.png,a"], "path,label", ("only the class a", "two classes")),
        ([], "path,label", ("no labels",)),
        (["00.png,a", "00.png,b"], "path,label", ("00.png", "twice")),
        (["00.png,a"], "path,kind", ("column label", "path, kind", "--probe_column")),
        (
            [f"{n},{'a' if i < 2 else 'b'}" for i, n in enumerate(NAMES)],
            "path,label",
            ("class a", "2 groups", "--probe_folds 3", "remove the class"),
        ),
        (
            [f"{n},{'ab'[i % 2]},g,{i % 3}" for i, n in enumerate(NAMES)],
            "path,label,group,fold",
            ("00.png", "01.png", "one group", "different folds"),
        ),
        (
            [f"{n},{'ab'[i % 2]},{i},{i % 2}" for i, n in enumerate(NAMES)],
            "path,label,group,fold",
            ("2 folds", "at least 3"),
        ),
        (
            [f"{n},{'a' if i % 4 == 0 else 'b'},{i},{i % 4}" for i, n in enumerate(NAMES)],
            "path,label,group,fold",
            ("class a", "1 of 4", "add images"),
        ),
        (["00.png,a", ",b"], "path,label", ("line 3", "no path")),
        (["a,00.png", "b"], "label,path", ("line 3", "no path")),
    ],
)
def test_mistakes_are_one_line(tmp_path, rows, header, tokens):
    with pytest.raises((DataError, UserError)) as caught:
        read_labels(write(tmp_path / "l.csv", rows, header), NAMES, "label", 3)
    message = str(caught.value)
    assert message.startswith("--probe ")
    assert "\n" not in message
    assert all(token in message for token in tokens)
