"""Pages from templates: values are escaped, files are inlined, and the policy allows nothing else.

The tests render their own template from a copy of the package in a zip file, because an installed package
must find its templates too.
"""

import base64
import hashlib
import re
import subprocess
import sys
import zipfile
from html import unescape

import pytest

from tests.harness.runs import ROOT
from vae.html import data_uri

TEMPLATES = {
    "plain.html.jinja": """{% extends "base.html.jinja" %}
{% block title %}{{ title }}{% endblock %}
{% block content %}<p title="{{ title }}">{{ title }}</p>{% endblock %}
""",
    "page.html.jinja": """{% extends "plain.html.jinja" %}
{% set css_files = ["page.css"] %}
{% set js_files = ["page.js"] %}
""",
    "page.css": "p { color: red; }\n",
    "page.js": "let a = 1 < 2;\n",
}
EVIL = "<script>alert(1)</script>\" onload='x' \u202e\n"
RENDER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from vae import html
assert html.__file__.startswith(sys.argv[1]), html.__file__
values = {"title": sys.argv[3]} if len(sys.argv) > 3 else {}
html.write_page(Path("page.html"), sys.argv[2], **values)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    path = tmp_path_factory.mktemp("installed") / "vae.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for module in (
            "__init__",
            "html",
            *(f"system/{name}" for name in ("__init__", "addresses", "console", "errors", "files")),
        ):
            archive.write(ROOT / "vae" / f"{module}.py", f"vae/{module}.py")
        for file in (ROOT / "vae" / "templates").iterdir():
            archive.write(file, f"vae/templates/{file.name}")
        for name, text in TEMPLATES.items():
            archive.writestr(f"vae/templates/{name}", text)
    return path


def run_render(package, *words):
    command = [sys.executable, "-c", RENDER, str(package), *words]
    return subprocess.run(command, cwd=package.parent, capture_output=True, text=True)


def rendered(package, *words) -> str:
    found = run_render(package, *words)
    assert found.returncode == 0, found.stderr
    return (package.parent / "page.html").read_bytes().decode()


def source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_values_are_escaped_and_files_are_inlined_with_their_hashes(package):
    page = rendered(package, "page.html.jinja", EVIL)
    escaped = page.partition('<p title="')[2].partition('"')[0]
    assert unescape(escaped) == EVIL.replace("\u202e", "\\u202e").replace("\n", "\\n")
    assert page.count(escaped) == 3
    assert not set(escaped) & set("<>\"'\n\u202e")
    style, script = (re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1] for tag in ("style", "script"))
    assert style == (ROOT / "vae" / "templates" / "base.css").read_text("utf-8") + TEMPLATES["page.css"]
    assert script == TEMPLATES["page.js"]
    assert page.count("<script") == 1
    policy = f"default-src 'none'; img-src data:; style-src {source(style)}; script-src {source(script)}; "
    assert f'content="{policy}base-uri' in page


def test_page_without_a_script_allows_none(package):
    page = rendered(package, "plain.html.jinja", "title")
    assert "script-src 'none';" in page
    assert "<script" not in page


def test_missing_value_is_an_error(package):
    found = run_render(package, "page.html.jinja")
    assert found.returncode != 0
    assert "'title' is undefined" in found.stderr


def test_data_uri_contains_the_bytes():
    assert data_uri(b"\x00\xff", "image/png") == "data:image/png;base64,AP8="
