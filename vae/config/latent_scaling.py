"""The scaling of latents, (z - shift) * scaling, of diffusion models: its options and published values."""

from typing import Any

from vae.config.declare import option
from vae.system.errors import UserError

# (scaling, shift) from the published config.json of each model.
PUBLISHED_SCALING = {
    "sd": (0.18215, 0.0),
    "sdxl": (0.13025, 0.0),
    "sd3": (1.5305, 0.0609),
    "flux": (0.3611, 0.1159),
}
_NAMES = {"sd": "SD 1.x and 2.x", "sdxl": "SDXL", "sd3": "SD3", "flux": "FLUX.1"}


def scaling_option() -> Any:
    """--scaling_factor of every script that writes a VAE."""
    return option(
        None,
        "scaling of latents, (z - shift) * scaling, to write instead of the one in the file or measured",
    )


def shift_option() -> Any:
    """--shift_factor of every script that writes a VAE."""
    return option(None, "shift of latents to write together with --scaling_factor")


def check_scaling(scaling: float | None, shift: float | None) -> None:
    """Raise UserError if the values of both options cannot be used."""
    if shift is not None and scaling is None:
        raise UserError("--shift_factor needs --scaling_factor: give both, or omit both")
    if scaling is not None and not scaling > 0:
        raise UserError(f"--scaling_factor {scaling} is not a scaling: give a number above 0")


def published_flags() -> str:
    """The flags for each published model."""
    return "; ".join(
        f"{_NAMES[name]}: --scaling_factor {scaling:g}" + (f" --shift_factor {shift:g}" if shift else "")
        for name, (scaling, shift) in PUBLISHED_SCALING.items()
    )
