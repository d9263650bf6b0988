"""The options of tune_vae.py, each declared once."""

from dataclasses import MISSING, dataclass

from vae.config.declare import check_once, nearest, option
from vae.config.flags import parse_section
from vae.system.errors import UserError

LOSS = "loss"
DIRECTIONS = {LOSS: "minimize", "psnr": "maximize", "ssim": "maximize", "lpips": "minimize"}  # the objectives
# A search of at most so many trials is random, and stops no trial early. In 150 simulated searches, the mean
# regret was 0.171 dB, and 0.190 dB with TPE and successive halving.
RANDOM_TRIALS = 24


@dataclass(frozen=True)
class TuneConfig:
    """The options and the images of a search, and its length."""

    output_dir: str = option(
        MISSING,
        "folder of the search: journal, trials, best.json and plots; created if missing; the same command "
        "continues the search in it, or joins one that runs",
        metavar="DIR",
        writes=True,
    )
    config: str | None = option(
        None,
        "JSON file of train_vae.py options, the defaults of the search; train_vae.py --save_config writes "
        "one",
        metavar="FILE",
    )
    data_path: tuple[str, ...] | None = option(
        None,
        "folder of images, manifest.jsonl or dataset.json, instead of the one in --config",
        metavar="PATH",
    )
    space: str | None = option(
        None,
        "JSON file of the options to search, with their ranges or values (docs/tune.md)",
        metavar="FILE",
        unset="learning rate, warmup, perceptual weight, EMA",
    )
    trials: int = option(
        RANDOM_TRIALS, "number of trials of the whole search, over all of its processes", at_least=1
    )
    objective: tuple[str, ...] = option(
        (LOSS,),
        "what is compared on the validation images: loss (with the weights of --config), psnr, ssim, lpips; "
        "several give a Pareto front, without pruning",
        metavar="NAME",
    )
    pruner: str = option(
        "auto",
        f"how trials are stopped early, by optimizer steps; auto: none up to {RANDOM_TRIALS} trials, asha "
        "above; asha: successive halving",
        choices=("auto", "asha", "none"),
    )
    min_steps: int = option(
        0,
        "optimizer steps before a trial may be stopped early; 0: a ninth of those of the defaults",
        at_least=0,
    )
    seed: int = option(
        0, "random seed of the search; that of training is in --config", at_least=0, at_most=2**31
    )


EPILOG = """examples:
  tune_vae.py --config base.json --data_path data/train --output_dir search/first
  tune_vae.py --config base.json --output_dir search/own --space space.json --trials 40
  tune_vae.py --config base.json --output_dir search/two --objective psnr ssim

Stop it with Ctrl-C; the same command continues. Start it again elsewhere to join.
"""


def parse_tune_flags(argv: list[str]) -> TuneConfig:
    """The options of one command. Raises UserError if they contradict each other."""
    config = parse_section(
        TuneConfig,
        "tune_vae.py",
        "Search for settings of train_vae.py with Optuna; every trial is a real training run.",
        EPILOG,
        argv,
    )
    _check_together(config)
    return config


def _check_together(config: TuneConfig) -> None:
    for name in config.objective:
        if name not in DIRECTIONS:
            raise UserError(
                f"--objective {name} is none of {', '.join(DIRECTIONS)}{nearest(name, DIRECTIONS)}"
            )
    check_once("objective", config.objective)
