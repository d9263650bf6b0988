"""What cmd needs of the .bat files and Wine's cmd does not: test_under_wine.py runs them."""

import re

import pytest

from tests.harness.runs import ROOT


@pytest.mark.parametrize("name", ["setup_windows.bat", "train_rtx5090.bat"])
def test_labels_exist_and_can_be_found(name):
    """cmd does not find labels in files with bare line feeds."""
    text = (ROOT / name).read_bytes()
    assert re.search(rb"(?<!\r)\n", text) is None
    assert "*.bat text eol=crlf" in (ROOT / ".gitattributes").read_text()
    text = re.sub(rb"(?im)^\s*rem .*$", b"", text)
    wanted = set(re.findall(rb"\bgoto (\w+)", text)) | set(re.findall(rb"\bcall :(\w+)", text))
    assert wanted == set(re.findall(rb"(?m)^:(\w+)", text)) != set()
