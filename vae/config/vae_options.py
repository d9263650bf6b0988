"""Options that the scripts for a finished VAE share: which weights of it, and how pictures are read."""

from typing import Any

from vae.config.options import option


def weights_option() -> Any:
    """Which weights of a checkpoint."""
    return option(
        "averaged",
        "which weights of our checkpoints: the validated average or the raw",
        choices=("averaged", "raw"),
    )


def background_option() -> Any:
    """What transparent pictures are laid over."""
    return option("white", "what shows through transparent pixels: a colour name or #rrggbb", metavar="COLOR")


def max_pixels_option(done: str) -> Any:
    """The largest picture that is decoded; `done`: what happens to others."""
    help_text = f"pictures with more pixels are {done} before they are decoded"
    return option(300_000_000, help_text, metavar="N", at_least=64)
