"""The pages in docs/: their code blocks and their commands."""

import re
import shlex

from tests.harness.runs import ROOT


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
