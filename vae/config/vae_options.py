"""Options that the scripts for a finished VAE share: which weights of it, and how images are read."""

from typing import Any

from vae.config.options import MAX_PIXELS, option


def weights_option() -> Any:
    """Which weights of a checkpoint."""
    return option(
        "ema",
        "which weights of our checkpoints: the validated average or the raw",
        choices=("ema", "raw"),
    )


def background_option() -> Any:
    """What transparent images are laid over."""
    return option("white", "what shows through transparent pixels: a colour name or #rrggbb", metavar="COLOR")


def max_pixels_option(done: str) -> Any:
    """The largest image that is decoded; `done`: what happens to others."""
    help_text = f"images with more pixels are {done} before they are decoded"
    return option(MAX_PIXELS, help_text, metavar="N", at_least=64)
