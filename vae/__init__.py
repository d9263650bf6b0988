"""A training toolkit for high-resolution image VAEs. docs/api.md describes its Python API.

Importing this package does nothing else: the names of the API are imported from vae.api when they are used.
"""

# Python 3.7 and newer must be able to run this file, so that an old Python gets a clear message.
import os
import sys
from typing import TYPE_CHECKING, Any

_MIN_PYTHON = (3, 10)

if sys.version_info < _MIN_PYTHON:
    _setup = "setup_windows.bat" if os.name == "nt" else "./setup.sh"
    _activate = ".venv\\Scripts\\activate" if os.name == "nt" else "source .venv/bin/activate"
    _version = ".".join(map(str, sys.version_info[:3]))
    _root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if os.path.realpath(getattr(sys.modules["__main__"], "__file__", "")).startswith(_root + os.sep):
        sys.tracebacklimit = 0  # a script of this project prints one line
    raise ImportError(
        f"Python {_version} is too old: 3.10 or newer is needed: run {_setup}, then activate its "
        f"environment: {_activate}"
    )

if TYPE_CHECKING:
    from vae.api import (
        LoadedVae,
        TrainingResult,
        UserError,
        decode,
        encode,
        evaluate,
        export,
        load_images,
        load_vae,
        reconstruct,
        to_pil,
        train,
    )

__all__ = [
    "LoadedVae",
    "TrainingResult",
    "UserError",
    "decode",
    "encode",
    "evaluate",
    "export",
    "load_images",
    "load_vae",
    "reconstruct",
    "to_pil",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a name of the API on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vae import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
