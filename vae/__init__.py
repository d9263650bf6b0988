"""A training toolkit for high-resolution image VAEs. docs/api.md describes its Python API.

Importing this package does nothing else: the names of the API are imported from vae.api when they are used.
"""

from typing import TYPE_CHECKING, Any

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
