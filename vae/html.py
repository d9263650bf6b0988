"""HTML pages from the Jinja2 templates in vae/templates. A page is one file that needs no other file.

Every value is escaped: text from outside cannot become markup. A page extends base.html.jinja, which inlines
the page's CSS and JS files and forbids everything else by its Content-Security-Policy.
"""

import base64
import functools
import hashlib
import importlib.resources
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from vae.system.console import printable
from vae.system.files import replace_text


def write_page(path: Path, template_name: str, **values: object) -> None:
    """Render a template of vae/templates into a file, atomically and part by part.

    A value may be an iterator of large parts, for example images. An undefined value raises UndefinedError.
    Line ends are "\\n" on every system, because the policy's hashes depend on them.
    """
    replace_text(path, _environment().get_template(template_name).generate(**values))


def data_uri(content: bytes, mime_type: str) -> Markup:
    """The content as a data: URI for an attribute. It is marked as safe, so rendering does not scan it."""
    return Markup(f"data:{mime_type};base64,{base64.b64encode(content).decode('ascii')}")


class PageChart(NamedTuple):
    """A chart in an HTML page; `label` is its text for screen readers."""

    title: str
    note: str
    label: str
    uri: Markup | None = None  # without one, the note is the reason


def page_chart(content: bytes, title: str, note: str, label: str) -> PageChart:
    """A chart from a PNG file, for the macro of chart.html.jinja."""
    return PageChart(title, note, label, data_uri(content, "image/png"))


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_read),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(inline_files=_inline_files, security_policy=_security_policy)
    return environment


def _read(name: str) -> str:
    """The text of a file in vae/templates, in a checkout or in an installed package, with "\\n" line ends."""
    return (importlib.resources.files("vae") / "templates" / name).read_text("utf-8")


def _printable(value: object) -> object:
    """Make plain text printable on one line; markup and other values are unchanged."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _inline_files(*names: str) -> Markup:
    return Markup("".join(map(_read, names)))


def _security_policy(style: str, script: str) -> Markup:
    """The policy of a page: images from data: URIs, this style, this script, and nothing else."""
    script_source = _hash_source(script) if script else "'none'"
    return Markup(
        f"default-src 'none'; img-src data:; style-src {_hash_source(style)}; "
        f"script-src {script_source}; base-uri 'none'; form-action 'none'"
    )


def _hash_source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"
