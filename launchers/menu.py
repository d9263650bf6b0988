"""The menu of the training launchers: which job, and for a new VAE which profile.

Needs only the standard library. Contains no settings: recipes are in vae/config.
"""

import os
import subprocess
from pathlib import Path

from vae.checks.machine import query_nvidia_smi
from vae.config.declare import PUBLISHED_SCALING, coerce, scaling_flags
from vae.config.model_options import ModelConfig
from vae.config.options import all_options
from vae.config.recipes import suggested_profile
from vae.config.resolve import check_image_size
from vae.system import console
from vae.system.errors import UserError

CHOICES = (
    *("ultra", "high", "standard", "fast", "custom"),
    *("card-8gb", "card-12gb", "card-16gb", "card-24gb", "demo"),
)
MENU = {str(number): name for number, name in enumerate(CHOICES, 1)}
JOBS = {
    "a": "improve the decoder of the VAE that your model uses: LoRAs and checkpoints go on working",
    "b": "train a new VAE, which no existing SDXL or FLUX model can read",
    "c": "train a new VAE with latents that diffusion models learn well",
    "d": "measure and compare VAEs",
}
PHOTOGRAPHS = "./data/train"
MEASURE = "evaluate_vae.py --vae FIRST SECOND --data_path FOLDER --output_dir RESULTS"
MIB_PER_GIB = 2**10


def ask_job(python: str) -> list[str] | None:
    """Show the menu; returns the arguments for the trainer, None if there is nothing to train."""
    command = [python, "train_vae.py", "--list_profiles"]
    listed = subprocess.run(command, capture_output=True, encoding="utf-8")
    if listed.returncode != 0:
        reason = (listed.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"train_vae.py --list_profiles failed: {reason}")
    lines = {line.split()[0]: line.strip() for line in listed.stdout.splitlines() if line.strip()}
    lines["custom"] = "custom     asks for image size and batch size"
    suggested, reason = suggestion()
    console.info("Which job is yours? (docs/jobs.md)")
    for letter, job in JOBS.items():
        console.info(f"  {letter:>2}  {job}")
    console.info(f"Or a new VAE from the images in {PHOTOGRAPHS}, with one of these profiles:")
    for number, name in MENU.items():
        console.info(f"  {number:>2}  {lines.get(name, name)}")
    console.info(f"Enter: {suggested}, because {reason}")
    while (answer := input("Choice: ").strip().lower()) not in ("", *MENU, *JOBS):
        console.info(f"{answer!r} is not one of {', '.join((*JOBS, *MENU))}.")
    if answer == "d":
        console.info(f"Nothing to train. To measure VAEs: {python} {MEASURE}")
        return None
    question = "Folder of the photographs"
    if answer in JOBS:
        return [*arguments_of(answer), "--data_path", ask_path(question, PHOTOGRAPHS)]
    name = MENU[answer] if answer else suggested
    if name == "demo":
        return ["--demo"]
    images = [] if contains_files(PHOTOGRAPHS) else ["--data_path", ask_path(question)]
    if name == "custom":
        return ["--profile", "standard", *images, *ask_option("image_size"), *ask_option("batch_size")]
    return ["--profile", name, *images]


def contains_files(folder: str) -> bool:
    """Whether a folder or one of its subfolders contains a file."""
    return any(path.is_file() for path in Path(folder).rglob("*"))


def arguments_of(job: str) -> list[str]:
    """The trainer's arguments for a job, without those for the photographs."""
    if job == "a":
        path = ask_path("File or folder of the VAE")
        return ["--profile", "decoder", "--init_from", path, *([] if os.path.isdir(path) else ask_scaling())]
    return ["--profile", "new" if job == "b" else "diffusable"]


def ask_scaling() -> list[str]:
    """Ask whose latents those of a single file are, whose scaling most such files do not contain."""
    question = f"Its diffusion model ({', '.join(PUBLISHED_SCALING)}; Enter: the file contains the scaling): "
    while (name := input(question).strip().lower()) not in ("", *PUBLISHED_SCALING):
        console.info(f"{name!r} is not one of {', '.join(PUBLISHED_SCALING)}.")
    return scaling_flags(*PUBLISHED_SCALING[name]).split() if name else []


def ask_path(question: str, default: str = "") -> str:
    """Ask for a file or folder until it exists; a path pasted in quotes or with ~ is understood."""
    hint = f" (Enter: {default})" if default else ""
    while True:
        answer = input(f"{question}{hint}: ").strip()
        if answer[:1] in ("'", '"') and answer[-1:] == answer[:1]:
            answer = answer[1:-1]
        path = os.path.expanduser(answer) or default
        if path and os.path.exists(path):
            return path
        # repr would double each backslash
        console.info(f'"{path}" does not exist.' if path else "Type its path, or press Ctrl-C to stop.")


def suggestion() -> tuple[str, str]:
    """The profile that suits the NVIDIA card with the least memory, and the reason in words."""
    smi = query_nvidia_smi()
    cards = [(card.memory_mib / MIB_PER_GIB, card.name) for card in smi.cards if card.memory_mib]
    if not cards:
        return suggested_profile(None), "no NVIDIA card was found"
    vram_gib, name = min(cards)
    return suggested_profile(vram_gib), f"the card is {name} with {vram_gib:.1f} GiB"


def ask_option(name: str) -> list[str]:
    """Ask for an option of the trainer until its value is valid; returns its flag and value."""
    _, item = all_options()[name]
    while True:
        answer = input(f"{item.metadata['help']}: ").strip()
        try:
            number = coerce(item, answer)
            if name == "image_size":
                check_image_size(number, ModelConfig())
        except UserError as error:
            console.info(str(error))
            continue
        return [f"--{name}", answer]
