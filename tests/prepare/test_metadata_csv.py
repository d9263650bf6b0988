"""Features and labels are joined by id; every mistake in them is an error of one line."""

import pytest

from vae.prepare.metadata_csv import read_metadata
from vae.system.errors import UserError

FEATURES = "id,filepath,site\nz1,a/x.jpg,S1\nz2,a\\y.jpg,S2\nz3,./z.png,S1\n"


@pytest.fixture
def tables(tmp_path):
    def write(features, labels=None):
        (tmp_path / "features.csv").write_text(features, encoding="utf-8")
        if labels is None:
            return tmp_path / "features.csv", None
        (tmp_path / "labels.csv").write_text(labels, encoding="utf-8")
        return tmp_path / "features.csv", tmp_path / "labels.csv"

    return write


@pytest.mark.parametrize(
    "labels",
    [
        "id,label\nz3,cat\nz1,dog\nz2,cat\n",  # by name, in another order
        "id,cat,dog\nz1,0,1\nz2,1.0,0.0\nz3,1,0\n",  # one-hot
        "\ufeffid;cat;dog\r\nz1;0;1\r\nz2;1;0\r\n\r\nz3;1;0\r\n",  # as spreadsheet programs save it
    ],
)
def test_labels_by_name_and_one_hot(tables, labels):
    found = read_metadata(*tables(FEATURES, labels))
    rows = [found.find(name) for name in ("a/x.jpg", "a/y.jpg", "z.png")]
    assert [found.labels[row["id"]] for row in rows] == ["dog", "cat", "cat"]
    assert [row["site"] for row in rows] == ["S1", "S2", "S1"]
    assert found.find("b.png") is None


def test_text_behind_an_apostrophe_against_formulas_is_read_as_it_was(tables):
    found = read_metadata(*tables("id,filepath,site\nz1,'=a.jpg,'-1+2\nz2,b.jpg,-1\n"))
    assert [found.find(name)["site"] for name in ("=a.jpg", "b.jpg")] == ["-1+2", "-1"]


@pytest.mark.parametrize(
    ("features", "labels", "words"),
    [
        ("id,path,site\n1,a,S\n", None, ["--features", "filepath", "id, path, site"]),
        ("name\n1\n", None, ["id and filepath"]),
        ("", None, ["id and filepath", "nothing"]),
        (FEATURES + "z1,b.jpg,S1\n", None, ["id z1", "twice"]),
        (FEATURES + "z4,a/x.jpg,S1\n", None, ["filepath a/x.jpg", "twice"]),
        (FEATURES + "z4,b.jpg\n", None, ["line 5", "2 values for 3 columns"]),
        ("id,filepath,id\n", None, ["column id twice"]),
        (FEATURES, "label\ncat\n", ["--labels", "column id"]),
        (FEATURES, "id\nz1\n", ["no column besides id"]),
        (FEATURES, "id,label\nz1,a\nz1,b\n", ["id z1", "twice"]),
        (FEATURES, "id,label\nz1,a\n", ["lacks 2 ids", "z2"]),
        (FEATURES, "id,label\nz1,a\nz2,a\nz3,\n", ["id z3", "no label"]),
        (FEATURES, "id,label\nz1,a\nz2,a\nz3,a\nz9,a\n", ["lacks 1 ids", "z9"]),
        (FEATURES, "id,a,b\nz1,1,1\nz2,1,0\nz3,0,1\n", ["id z1", "one-hot"]),
        (FEATURES, "id,a,b\nz1,0,0\nz2,1,0\nz3,0,1\n", ["id z1", "one-hot"]),
        (FEATURES, "id,a,b\nz1,cat,0\nz2,1,0\nz3,0,1\n", ["id z1", "one-hot"]),
    ],
)
def test_invalid_tables_are_errors_of_one_line(tables, features, labels, words):
    with pytest.raises(UserError) as caught:
        read_metadata(*tables(features, labels))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_errors_name_unknown_columns_and_empty_values(tables):
    found = read_metadata(*tables("id,filepath,site\n1,a.jpg,\n2,b.jpg,S\n"))
    with pytest.raises(UserError, match=r"--group_by sit: .*did you mean site"):
        found.check_column("sit", "--group_by")
    with pytest.raises(UserError, match=r"1 images .* have no site, for example 1"):
        found.check_column("site", "--group_by")


def test_unreadable_files_are_errors(tmp_path):
    with pytest.raises(UserError, match=r"--features .*none.csv cannot be read"):
        read_metadata(tmp_path / "none.csv")
    (tmp_path / "utf16.csv").write_text("id,filepath\n", encoding="utf-16")
    with pytest.raises(UserError, match="not UTF-8"):
        read_metadata(tmp_path / "utf16.csv")
