"""How an option is declared: a dataclass field with its help text, its limits and facts about it.

The options that several scripts have are declared here, once.
"""

from dataclasses import field
from typing import Any, Literal

from vae.system.errors import UserError

MAX_PIXELS = 300_000_000  # per image file: 0.9 GB of decoded RGB


def option(
    default: Any,
    help: str,
    *,
    choices: tuple | None = None,
    metavar: str | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    auto: bool = False,
    unset: str | None = None,
    words: bool = False,
    scope: Literal["result", "machine"] = "result",
    inherited: bool = True,
    writes: bool = False,
    changes_samples: bool = False,
) -> Any:
    """A dataclass field with its help text and valid values; `auto` also allows the text "auto".

    `unset` is what the default None means, as the help prints it. `words`: several make one text.

    scope: "machine" if another value gives the same result, so that machines of one search may differ.
    inherited: whether a resumed run takes the value from its checkpoint.
    writes: it is a path that is written. changes_samples: it changes training crops.
    """
    limits = {"at_least": at_least, "at_most": at_most, "auto": auto, "words": words}
    texts = {"help": help, "choices": choices, "metavar": metavar, "unset": unset}
    facts = {"scope": scope, "inherited": inherited, "writes": writes, "changes_samples": changes_samples}
    return field(default=default, metadata={**texts, **limits, **facts})


def term_weight(
    default: float, help: str, term: str, *, always: bool = False, statistics: bool = False
) -> Any:
    """The weight of a term of the training loss: NAME_weight is that of `vae/losses/NAME.py`.

    `term` is "image", "latent" or "view", as in `LossTerms`. With weight 0 the term is not
    computed, unless `always`. `statistics`: it needs those of the latents (vae/losses/latent_statistics.py).
    """
    metadata = option(default, help, at_least=0).metadata
    facts = {"term": term, "always": always, "statistics": statistics}
    return field(default=default, metadata={**metadata, **facts})


def device_option(purpose: str) -> Any:
    """--device of every script that computes."""
    return option(
        "auto",
        f"device {purpose}; auto: cuda if available",
        choices=("auto", "cuda", "cpu"),
        inherited=False,
        scope="machine",
    )


def kernels_option() -> Any:
    """--kernels of every script that computes."""
    return option(
        "auto",
        "our kernels on a GPU; auto: Triton, or PyTorch for one that fails its test at the start; triton: an "
        "error if one fails; torch: slower",
        choices=("auto", "triton", "torch"),
        scope="machine",
    )


def background_option() -> Any:
    """--background of every script that decodes images."""
    return option(
        "white",
        "colour behind transparent pixels: a colour name or #rrggbb",
        metavar="COLOR",
        changes_samples=True,
    )


def max_pixels_option(action: str) -> Any:
    """--max_pixels of every script that decodes images; `action`: what happens to larger ones."""
    help_text = f"{action} images with more pixels than this before decoding them"
    return option(MAX_PIXELS, help_text, metavar="N", at_least=64, changes_samples=True)


def cache_dir_option() -> Any:
    """--cache_dir of every script that reads a dataset of shards."""
    return option(
        None,
        "folder on this machine for shards of remote datasets; if given, also for those on a shared disk",
        metavar="DIR",
        unset="vae-trainer in the user's cache folder",
        inherited=False,
        scope="machine",
        writes=True,
    )


def cache_gib_option() -> Any:
    """--cache_gib of every script that reads a dataset of shards."""
    return option(
        50,
        "maximum GiB of --cache_dir",
        metavar="GIB",
        at_least=0,
        inherited=False,
        scope="machine",
    )


def exclude_option() -> Any:
    """--exclude of every script that measures or trains with images."""
    return option(
        None,
        "text file of images that are not used (docs/shards.md)",
        metavar="FILE",
    )


def weights_option() -> Any:
    """--weights of every script that reads a trained VAE."""
    help_text = "weights to read from a checkpoint of train_vae.py: EMA weights or raw weights"
    return option("ema", help_text, choices=("ema", "raw"))


# ---- scaling of latents ------------------------------------------------------------------------------------
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
