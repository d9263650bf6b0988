"""JPEG decoding that takes every complaint of the decoder for damage, by simplejpeg where it is installed.

Pillow's reader hears libjpeg's warnings and says nothing: of 200 images with one flipped byte it noticed 1,
simplejpeg 89. Both are libjpeg-turbo and give the same pixels; simplejpeg takes a third of the time.
"""

import mmap
from functools import cache

import numpy as np

from vae.data.formats import BadImageError

COLOR_SPACES = {"RGB": "RGB", "L": "GRAY"}  # Pillow's mode: simplejpeg's name


@cache
def has_simplejpeg() -> bool:
    """Whether simplejpeg can be imported here."""
    try:
        import simplejpeg  # noqa: F401
    except ImportError:
        return False
    return True


def decode_strictly(file, end: int, mode: str) -> np.ndarray | None:
    """Pixels (H, W, 3) or (H, W, 1) of the JPEG up to byte `end`; None where only Pillow can decode it.

    Raises BadImageError for what libjpeg would only have warned of.
    """
    if not has_simplejpeg():
        return None
    import simplejpeg

    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data)[:end] as whole:
        try:
            if mode in COLOR_SPACES:
                return simplejpeg.decode_jpeg(whole, COLOR_SPACES[mode], strict=True)
            # CMYK: Pillow decodes, this only listens for complaints; at an eighth, since all bits are read
            simplejpeg.decode_jpeg(whole, "CMYK", min_factor=8, strict=True)
        except ValueError as error:
            text = " ".join(str(error).split())
            raise BadImageError("truncated" if "remature end" in text else "damaged", text) from error
    return None
