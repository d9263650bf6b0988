"""The pages in docs/: their code blocks, their commands and their tables of flags."""

import re
import shlex
from dataclasses import MISSING, fields

from tests.harness.runs import ROOT
from vae.config.flags import default_text


def page_text(name: str) -> str:
    """The text of docs/NAME."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def code_blocks(text: str, language: str) -> list[str]:
    """The content of all code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def commands(text: str) -> list[list[str]]:
    """The words of every command in the bash blocks, with continued lines joined and without comments."""
    lines = "\n".join(code_blocks(text, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line and not line.startswith("#")]


def check_table_of_flags(text: str, config: type) -> None:
    """The table below `## Flags` lists every option of `config`, in order and with its default."""
    table = text.partition("\n## Flags\n")[2]
    rows = dict(re.findall(r"^\| `--(\w+).*?` \|.*\| (.*?) \|$", table, re.M))
    assert list(rows) == [item.name for item in fields(config)]
    for item in fields(config):
        expected = "required" if item.default is MISSING else default_text(item)
        assert rows[item.name] == expected, item.name
