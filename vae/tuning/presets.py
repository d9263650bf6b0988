"""The presets of --space, and known recipes that a search tries right after the defaults."""

from typing import Any

from vae.config.options import Config, flatten
from vae.tuning.space import Choices, Range, Space

PRESETS = ("quick", "full")
# Ranges around published settings: AdamW at 4.5e-6 (CompVis' KL autoencoders) to 1e-3 (our demo profile),
# LPIPS weights of 0.1 to 1, KL weights of 1e-8 (VA-VAE, https://github.com/hustvl/LightningDiT: 1e-6), and
# adversarial weights of 0.05 (DC-AE, arXiv 2410.10733) to 0.5 (CompVis, VA-VAE).
_QUICK: Space = {
    "learning_rate": Range(5e-6, 3e-3, log=True),
    "warmup_epochs": Range(0.0, 10.0),
    "perceptual_weight": Range(0.05, 2.0, log=True),
    "reconstruction_weight": Range(0.3, 3.0, log=True),
    "ema_decay": Choices((0.9, 0.99, 0.995, 0.999, 0.9995, 0.9999)),
}
_MORE: Space = {
    "reconstruction_loss": Choices(("l1", "mse")),
    "beta1": Choices((0.5, 0.8, 0.9, 0.95)),
    "beta2": Choices((0.9, 0.95, 0.99, 0.999)),
    "weight_decay": Range(1e-6, 1e-1, log=True),
    "lr_schedule": Choices(("cosine", "constant", "onecycle")),
    "z_channels": Choices((4, 8, 16, 32)),
    "kl_weight": Range(1e-7, 1e-3, log=True),
}
_ADVERSARIAL: Space = {
    "adversarial_weight": Range(0.05, 1.0, log=True),
    "disc_learning_rate": Range(1e-5, 1e-3, log=True),
}
# Published or measured settings, tried in this order after the defaults.
RECIPES: dict[str, dict[str, Any]] = {
    # Profile `demo`: small networks without LPIPS.
    "demo": {"learning_rate": 1e-3},
    # Profile `decoder`, from AiArtLab's and DC-AE's fine-tuning.
    "decoder": {"learning_rate": 5e-5, "warmup_epochs": 1.0, "disc_learning_rate": 5e-5},
    # CompVis latent-diffusion, autoencoder_kl: Adam with betas (0.5, 0.9).
    "ldm": {"beta1": 0.5, "beta2": 0.9},
}


def preset(name: str, base: Config) -> tuple[Space, list[str]]:
    """The space of a preset, widened to contain the defaults, and the names that it leaves out.

    A loss term that the defaults have switched off stays off.
    """
    values = flatten(base)
    space = dict(_QUICK)
    if name == "full":
        batch = base.run.batch_size
        space |= {**_MORE, "batch_size": Choices(tuple(sorted({max(1, batch // 2), batch, 2 * batch})))}
        if base.loss.adversarial_weight > 0:
            space |= _ADVERSARIAL
    if base.loss.perceptual_weight == 0:  # the only other term: its weight changes little in AdamW
        del space["reconstruction_weight"]
    left_out = [n for n, part in space.items() if isinstance(part, Range) and part.log and values[n] == 0]
    return {n: _widened(part, values[n]) for n, part in space.items() if n not in left_out}, left_out


def _widened(part: Range | Choices, value: Any) -> Range | Choices:
    if isinstance(part, Range):
        return part._replace(low=min(part.low, value), high=max(part.high, value))
    if part.contains(value):
        return part
    return Choices((*part.values, value))


def known_recipes(space: Space, base: Config) -> dict[str, dict[str, Any]]:
    """The recipes that differ from the defaults within the space; other options keep their defaults."""
    values = flatten(base)
    recipes = {}
    for name, recipe in RECIPES.items():
        inside = {n: v for n, v in recipe.items() if n in space and space[n].contains(v)}
        if any(values[n] != v for n, v in inside.items()):
            recipes[name] = {**{n: values[n] for n in space}, **inside}
    return recipes
