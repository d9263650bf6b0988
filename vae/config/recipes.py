"""Named recipes for `--profile`. A recipe sets what is trained; it never depends on the card."""

import re
from dataclasses import dataclass

from vae.config.declare import OptionValues, nearest
from vae.system.errors import UserError


@dataclass(frozen=True)
class Recipe:
    """A purpose, and option values beside --mixed_precision, which all profiles have."""

    purpose: str
    values: OptionValues


# Steps of 16 images, however many there are. A published decoder was adapted to a style in 4,170 steps of 12
# images (https://huggingface.co/thomaseding/vae-teding-aliased-2024-03). docs/jobs.md has the time.
DECODER_STEPS = 5000

# Losses of sd-vae-ft-ema, which are those of its initial VAE: L1, LPIPS and the adversarial term
# (https://huggingface.co/stabilityai/sd-vae-ft-ema). The weight is measured: a stronger one costs more than
# half a dB (benchmarks/LOG.md, "The adversarial loss").
_DECODER = {
    "train_part": "decoder",
    "image_size": 512,
    "batch_size": 16,
    "warmup_epochs": 1.0,
    "num_steps": DECODER_STEPS,
    "adversarial_weight": 0.25,
    "disc_start": 0.5,
    "disc_learning_rate": 1e-4,
}

RECIPES = {
    "ultra": Recipe("the largest crops of the menu", {"image_size": 2048, "batch_size": 4}),
    "high": Recipe("large crops", {"image_size": 1536, "batch_size": 8}),
    "standard": Recipe("recommended", {"image_size": 1024, "batch_size": 16}),
    "fast": Recipe("fast steps", {"image_size": 768, "batch_size": 24}),
    "small": Recipe("first stage of a progressive run", {"image_size": 512, "batch_size": 32}),
    "maximum": Recipe("experimental", {"image_size": 2560, "batch_size": 2, "accumulation_steps": 2}),
    # From scratch, as the field does it: most steps at 256 px with large batches, the adversarial loss late,
    # and larger crops in a later stage (docs/jobs.md).
    "new": Recipe(
        "a new VAE from scratch, first stage",
        {
            "image_size": 256,
            "batch_size": 64,
            "adversarial_weight": 0.25,
            "disc_start": 0.5,
            "disc_learning_rate": 5e-5,
        },
    ),
    # Of the measured regularisers, variance expansion costs least PSNR for what it gains in samples, among
    # those that hold from the start (docs/training.md, "Latents for diffusion models").
    "diffusable": Recipe(
        "a new VAE with latents that diffusion models learn well",
        {"image_size": 256, "batch_size": 64, "kl_weight": 0.0, "variance_weight": 0.01},
    ),
    # For cards of one size: the largest crops that fit without recomputing more than activations, so that a
    # step needs no more arithmetic than on a large card (tests/memory/test_plan_table.py runs the planner).
    "card-8gb": Recipe("for cards with 8 GB", {"image_size": 512, "batch_size": 16}),
    "card-12gb": Recipe("for cards with 12 GB", {"image_size": 768, "batch_size": 12}),
    "card-16gb": Recipe("for cards with 16 GB", {"image_size": 1024, "batch_size": 8}),
    "card-24gb": Recipe("for cards with 24 GB", {"image_size": 1280, "batch_size": 8}),
    "decoder": Recipe("improves the decoder of --init_from", _DECODER),
    "small-decoder": Recipe(
        "a new decoder of half the width for --init_from",
        {**_DECODER, "decoder_channels": [64, 128, 256, 256]},
    ),
    "demo": Recipe(
        "a first look, a few minutes on a CPU",
        {
            "channels": [32, 64, 64, 64],
            "layers_per_block": 1,
            "norm_groups": 8,
            "image_size": 128,
            "batch_size": 4,
            "num_epochs": 15,
            "perceptual_weight": 0.0,  # LPIPS would download 528 MiB
            "val_freq": 5,
            "checkpoint_freq": 50,
        },
    ),
    "demo-gpu": Recipe(
        "a first look, a few minutes on a card",
        {
            "image_size": 192,  # less than the 256 px of the drawn images, so that crops differ
            "batch_size": 8,
            "num_epochs": 100,
            "perceptual_weight": 0.0,
            "val_freq": 10,
            "checkpoint_freq": 100,
        },
    ),
}


def recipe_values(name: str, has_gpu: bool) -> OptionValues:
    """Option values of the profile `name`; with a GPU, `demo` means `demo-gpu`."""
    if name == "demo" and has_gpu:
        name = "demo-gpu"
    if name not in RECIPES:
        raise UserError(f"--profile {name} is unknown{nearest(name, RECIPES)} ({', '.join(RECIPES)})")
    return {"mixed_precision": True, **RECIPES[name].values}


def profile_table() -> str:
    """One line per profile: name, image size, batch size and purpose."""
    lines = []
    for name, recipe in RECIPES.items():
        size, batch = recipe.values["image_size"], recipe.values["batch_size"]
        lines.append(f"{name:<13} {size:>4} px   batch {batch:>2}   {recipe.purpose}")
    return "\n".join(lines)


def suggested_profile(vram_gib: float | None) -> str:
    """The profile for a card with this memory, or without a card: the name of an entry of RECIPES."""
    if vram_gib is None or vram_gib < 5.5:  # GiB; the least memory at which card-8gb repeats no convolution
        return "demo"
    if vram_gib >= 30:  # a 32 GB card
        return "standard"
    sizes = [int(re.sub(r"\D", "", name)) for name in RECIPES if name.startswith("card-")]
    # An A10 with "24 GB" has 22.5 GiB, a T4 with "16 GB" has 15: ECC takes a sixteenth.
    fitting = [size for size in sizes if vram_gib >= 0.93 * size]
    return f"card-{max(fitting, default=min(sizes))}gb"
