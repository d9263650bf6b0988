"""The options of a training run, each declared once with its default, unit and help text.

Flags, JSON files, checkpoints and docs/flags.md are all generated from these fields.
"""

from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from vae.config.declare import (
    OptionValues,
    background_option,
    cache_dir_option,
    cache_gib_option,
    coerce,
    device_option,
    exclude_option,
    kernels_option,
    max_pixels_option,
    option,
    term_weight,
)
from vae.config.model_options import MAX_CHANNELS, ModelConfig
from vae.system.addresses import public_options

PROVENANCE = "provenance"  # a key of config.json that is no option: see vae/training/provenance.py
NO_JITTER = (0.0, 0.0, 0.0, 0.0)  # --color_jitter of brightness, contrast, saturation and hue
MIN_VIEW = 16  # px of a smaller image of --equivariance_weight: LPIPS halves it four times
MIN_IMAGE_SIZE = 11  # px: the SSIM window (Wang et al. 2004); every validation measures SSIM
CHECKPOINT_MINUTES = 10  # between those that no flag asks for: 1.3 GB each by default, 190 GB a day
# Recompute levels, from the fastest to the one that needs least memory: each names what backward recomputes.
RECOMPUTE = ("none", "activations", "top_level", "blocks", "blocks_encoder", "all")


@dataclass(frozen=True)
class DataConfig:
    """The images that are read, and the batches that are made from them."""

    data_path: tuple[str, ...] = option(
        ("./data/train",),
        "folder of images (subfolders included), a manifest.jsonl, or a dataset.json of prepare_data.py "
        "--mode shard or index, also on a remote store (s3://, gs://, https://); several folders, or "
        "several datasets, count as one; or a dataset of the Hugging Face hub, hf://datasets/OWNER/NAME[/SPLIT]",
        metavar="PATH",
    )
    fold: int | None = option(None, "fold of the manifest that validates, instead of its split", at_least=0)
    val_path: str | None = option(
        None,
        "folder of validation images, a dataset.json or a dataset of the hub, instead of --val_split",
        metavar="PATH",
    )
    exclude: str | None = exclude_option()
    data_streams: int | None = option(
        None,
        "streams of a dataset of shards (docs/shards.md)",
        unset="by the size of the dataset",
        at_least=1,
    )
    shuffle_shards: int | None = option(
        None,
        "shards whose images are mixed at a time, in all streams; more need a larger cache",
        unset="256, or as many as fit into --cache_gib",
        at_least=1,
    )
    cache_dir: str | None = cache_dir_option()
    cache_gib: float = cache_gib_option()
    val_split: float = option(
        0.1,
        "fraction of --data_path that validates, by a hash of file name and --split_seed",
        at_least=0,
        at_most=0.9,
    )
    split_seed: int | None = option(
        None, "seed of --val_split", unset="--seed", at_least=0, at_most=2**63 - 1
    )
    max_val_images: int = option(
        256, "maximum number of images per validation, a sample by hash; 0: all", at_least=0
    )
    image_size: int = option(512, "side of the square training crops, in px")
    crop: str = option(
        "random",
        "training crop; resized: a region of random size and shape, scaled to --image_size",
        choices=("random", "center", "resized"),
        changes_samples=True,
    )
    crop_scale: tuple[float, ...] = option(
        (0.25, 1.0), "area of the regions of --crop resized", at_least=0.01, at_most=1, changes_samples=True
    )
    crop_ratio: tuple[float, ...] = option(
        (0.75, 1.3333),
        "width / height of the regions of --crop resized",
        at_least=0.1,
        at_most=10,
        changes_samples=True,
    )
    buckets: int = option(
        0,
        "shapes of training crops, from 1:2 to 2:1; even: and the square (docs/training.md); 0: square crops",
        at_least=0,
        at_most=64,
        changes_samples=True,
    )
    horizontal_flip: bool = option(True, "mirror half of the training crops, at random", changes_samples=True)
    rotate90: bool = option(
        False, "turn training crops by multiples of 90 degrees, at random", changes_samples=True
    )
    color_jitter: tuple[float, ...] = option(
        NO_JITTER,
        "largest random changes of brightness, contrast, saturation and hue",
        at_least=0,
        at_most=1,
        changes_samples=True,
    )
    upscale: bool = option(False, "enlarge images smaller than --image_size", changes_samples=True)
    background: str = background_option()
    max_pixels: int = max_pixels_option("reject")
    max_bad_fraction: float = option(
        0.05, "fraction of unusable training images above which a run stops", at_least=0, at_most=1
    )
    num_workers: str = option(
        "auto",
        "image decoding processes; auto: usable CPU cores minus 2, at least 1 and at most 12",
        auto=True,
        at_least=0,
        inherited=False,
    )
    prefetch_factor: int = option(4, "batches that each worker decodes ahead", at_least=1)
    persistent_workers: bool = option(True, "keep the worker processes between epochs")


@dataclass(frozen=True)
class LossConfig:
    """The terms of the training loss and their weights."""

    reconstruction_loss: str = option("l1", "per-pixel loss of values in [-1, 1]", choices=("l1", "mse"))
    reconstruction_weight: float = term_weight(1.0, "weight of the per-pixel loss", "image", always=True)
    mse_weight: float = term_weight(0.0, "weight of the mean squared error beside an l1 loss", "image")
    perceptual_weight: float = term_weight(
        1.0, "weight of LPIPS, or of DINOv2's distance; with 0 no network is downloaded", "image"
    )
    perceptual_net: str = option(
        "vgg",
        "LPIPS network; random: vgg with random weights, without a download: try --perceptual_weight 3; "
        "dinov2-s: tokens of DINOv2 ViT-S/14 instead of LPIPS (84 MiB)",
        choices=("vgg", "alex", "squeeze", "random", "dinov2-s"),
    )
    perceptual_weights: str | None = option(
        None, "file with the weights of --perceptual_net, instead of a download", metavar="FILE"
    )
    ssim_weight: float = term_weight(
        0.0, "weight of 1 - SSIM over three scales; without LPIPS try 0.3", "image"
    )
    kl_weight: float = term_weight(
        1e-6,
        "weight of the KL divergence in nats per pixel of the image; 1e-6 is 3 times the 1e-6 of SD's "
        "training code (docs/training.md)",
        "latent",
        always=True,
    )
    variance_weight: float = term_weight(
        0.0,
        "weight of variance expansion; use it with --kl_weight 0 (docs/training.md)",
        "latent",
        statistics=True,
    )
    variance_target: float = option(
        0.25,
        "the posterior's noise that --variance_weight aims at, in standard deviations of the latents",
        at_least=0.001,
        at_most=1,
    )
    equivariance_weight: float = term_weight(
        0.0, "weight of scale equivariance of the latents (docs/training.md)", "view"
    )
    teacher: str | None = option(
        None,
        "VAE whose latents an AutoencoderTiny learns to encode and to decode (docs/export.md)",
        metavar="PATH",
    )
    teacher_weight: float = option(
        1.0, "weight of the squared error of the latents beside those of --teacher", at_least=0
    )
    adversarial_weight: float = option(0.0, "weight of the adversarial loss; 0: no discriminator", at_least=0)
    disc_start: float = option(
        5000.0,
        "optimizer step of the run at which the discriminator and the adversarial loss start; below 1: a "
        "share of the steps of the stage, such as 0.5",
        at_least=0,
    )
    # An untrained discriminator led a small network away: 26.3 -> 22.1 dB, with 60 steps alone first and a
    # longer ramp it did not (benchmarks/LOG.md, "The adversarial loss").
    disc_warmup: int = option(
        100, "optimizer steps for which the discriminator learns alone first", at_least=0
    )
    disc_ramp: int = option(
        1000, "optimizer steps over which the adversarial loss ramps up to its weight", at_least=0
    )
    disc_max_weight: float = option(
        100.0, "upper limit of the adaptive weight (docs/monitoring.md)", at_least=0
    )
    disc_channels: int = option(
        64, "channels of the PatchGAN discriminator's first layer", at_least=1, at_most=MAX_CHANNELS
    )
    disc_layers: int = option(
        3, "number of strided layers in the PatchGAN discriminator", at_least=1, at_most=100
    )
    disc_learning_rate: float = option(1e-4, "peak learning rate of the discriminator", at_least=0)


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    optimizer: str = option(
        "adamw",
        "optimizer of the autoencoder; muon: Muon for the hidden weights, AdamW for all others",
        choices=("adamw", "muon"),
    )
    learning_rate: float | None = option(
        None,
        "peak learning rate of the autoencoder",
        metavar="RATE",
        unset="1e-4 x 512 / widest level; less for short stages, random weights, trained VAEs and later "
        "stages (docs/training.md)",
        at_least=0,
    )
    weight_decay: float = option(1e-5, "decoupled weight decay", at_least=0)
    beta1: float = option(0.9, "AdamW's decay rate of the gradient mean", at_least=0, at_most=0.9999)
    beta2: float = option(
        0.99, "AdamW's decay rate of the squared-gradient mean", at_least=0, at_most=0.99999
    )
    lr_schedule: str = option(
        "cosine", "learning-rate schedule within a stage", choices=("cosine", "constant", "onecycle")
    )
    warmup_epochs: float = option(
        5.0, "epochs of linear warmup at the start of a stage, limited to a fifth of the stage", at_least=0
    )
    gradient_clip: float = option(1.0, "maximum norm of the whole gradient; 0: no clipping", at_least=0)
    ema_decay: float = option(
        0.999,
        "decay of the EMA weights, which are validated and exported; 0: no EMA",
        at_least=0,
        at_most=0.99999,
    )
    train_part: str = option(
        "all",
        "networks to train; decoder: the encoder is frozen, so the latents stay the same",
        choices=("all", "decoder"),
    )
    max_nonfinite_steps: int = option(
        50, "non-finite steps in a row after which training counts as diverged", at_least=1
    )


@dataclass(frozen=True)
class SpeedConfig:
    """Precision and speed. Results change only by rounding."""

    mixed_precision: bool = option(
        False,
        "use fp16 with loss scaling on a GPU, bf16 if activations overflow even scaled; on a CPU bf16 if it "
        "has instructions for it; the choice is printed",
    )
    use_bf16: bool | None = option(
        None,
        "use bf16 even if it is slow; an error if the device does not support it; --no-use_bf16: never",
        unset="see --mixed_precision",
    )
    enable_tf32: bool = option(True, "use TF32 for fp32 matrix products and convolutions on NVIDIA cards")
    channels_last: bool = option(True, "use the NHWC memory layout, which our kernels need")
    use_torch_compile: bool = option(
        False, "compile the networks except LPIPS with torch.compile; no gain is known (docs/rtx5090.md)"
    )
    cuda_graph: bool | None = option(
        None,
        "start a step's kernels with one call (docs/memory.md)",
        unset="on below 1024 px, for one process",
    )
    micro_batch_size: str = option(
        "auto",
        "images per forward and backward pass; auto: as many as fit",
        auto=True,
        at_least=1,
        inherited=False,
    )
    recompute: str = option(
        "auto",
        "what backward recomputes, fastest first; auto: the fastest that fits (docs/memory.md)",
        choices=("auto", *RECOMPUTE),
        inherited=False,
    )
    gradient_dtype: str = option(
        "fp32", "what several processes sum gradients in (docs/cluster.md)", choices=("fp32", "bf16")
    )
    vram_margin: float = option(
        0.98,
        "fraction of the free device memory that a run may use",
        at_least=0.1,
        at_most=1,
        inherited=False,
    )
    device: str = device_option("to train on")
    kernels: str = kernels_option()
    profile_steps: int = option(
        0, "write a trace of torch.profiler of this many steps; 0: off", at_least=0, inherited=False
    )


@dataclass(frozen=True)
class RunConfig:
    """Length of the run, batch size, and output files."""

    config: str | None = option(
        None, "JSON file of options; flags override it", metavar="FILE", inherited=False
    )
    profile: str | None = option(
        None, "named recipe; --list_profiles lists all of them", metavar="NAME", inherited=False
    )
    output_dir: str = option(
        "./outputs", "folder for all files of the run", metavar="DIR", inherited=False, writes=True
    )
    resume_from: str | None = option(
        None,
        "checkpoint to resume from; latest: the newest valid one in --output_dir",
        metavar="PATH|latest",
        inherited=False,
    )
    new_stage: bool = option(
        False, "with --resume_from latest: start a new stage if the run is finished", inherited=False
    )
    batch_size: int = option(4, "images per device and optimizer step", at_least=1)
    global_batch_size: int | None = option(
        None,
        "images of all devices per optimizer step, with accumulation, instead of --batch_size",
        at_least=1,
    )
    accumulation_steps: int = option(
        1, "batches whose gradients are accumulated before each optimizer step", at_least=1
    )
    num_epochs: int | None = option(
        None, "number of epochs in the stage", unset="100, without --num_steps", at_least=1, at_most=10**9
    )
    num_steps: int | None = option(
        None, "number of optimizer steps in the stage, instead of --num_epochs", at_least=1, at_most=10**12
    )
    find_lr: bool = option(
        False,
        "find a learning rate instead of training, and print the command that trains with it",
        inherited=False,
    )
    find_lr_steps: int = option(200, "optimizer steps of --find_lr", at_least=50, inherited=False)
    max_steps: int | None = option(
        None, "stop when the whole run reaches this many optimizer steps", at_least=1, inherited=False
    )
    progressive: str | None = option(
        None,
        "several stages in one command, as comma-separated SIZE:EPOCHS:BATCH; SIZE:2000steps:BATCH has 2000 "
        "optimizer steps",
        metavar="LIST",
        inherited=False,
    )
    checkpoint_freq: int | None = option(
        None,
        "epochs between checkpoints; by default a new best or last epoch, and others at most every "
        f"{CHECKPOINT_MINUTES} minutes",
        at_least=1,
    )
    checkpoint_steps: int = option(0, "optimizer steps between extra checkpoints; 0: none", at_least=0)
    keep_checkpoints: int = option(
        3, "checkpoints to keep besides the best one and the last one of each stage", at_least=2
    )
    background_save: bool = option(
        True, "write checkpoints while training goes on, from a copy in main memory"
    )
    save_samples_freq: int = option(100, "optimizer steps between sample grids; 0: none", at_least=0)
    sample_images: str | None = option(None, "folder of up to 8 images for the sample grids", metavar="DIR")
    val_freq: int | None = option(
        None,
        "epochs between validations; the end of a stage is always validated",
        unset="so many that they take about a tenth of the time; within epochs that are long for --num_steps",
        at_least=1,
    )
    quick_val_images: int = option(32, "validation images of the quick validation", at_least=1)
    quick_val_steps: int = option(500, "optimizer steps between quick validations; 0: none", at_least=0)
    regression_share: float = option(
        0.1,
        "rise of a quick validation's loss, as a share of its lowest, that causes a warning and a validation",
        metavar="SHARE",
        at_least=0,
    )
    log_freq: int = option(10, "optimizer steps between log records", at_least=1)
    wandb: bool = option(False, "also log to Weights & Biases")
    wandb_project: str = option("vae-trainer", "project of --wandb", metavar="NAME")
    early_stopping: int = option(
        0, "end the stage after this many validations without a lower loss; 0: off", at_least=0
    )
    hang_minutes: float = option(
        30.0,
        "minutes without progress after which the run saves and exits; 0: off",
        metavar="MINUTES",
        at_least=0,
        inherited=False,
    )
    seed: int = option(
        0, "random seed of weights, image order, crops and noise", at_least=0, at_most=2**63 - 1
    )


@dataclass(frozen=True)
class ActionConfig:
    """Actions instead of training. They are flags only, and never part of a configuration."""

    list_profiles: bool = option(False, "list the profiles and exit")
    plan: bool = option(
        False, "print memory and least time of the steps of this command, here or on --gpu NAME, and exit"
    )
    gpu: str | None = option(None, "--plan for this card", metavar="NAME")
    vram_gib: float | None = option(None, "--plan for a card with this memory", metavar="GIB")
    save_config: str | None = option(
        None,
        "write all options of this command to FILE, as JSON for --config, and exit",
        metavar="FILE",
        writes=True,
    )


@dataclass(frozen=True)
class Config:
    """All options of a training run. Each package below `training` receives only its own section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    run: RunConfig = field(default_factory=RunConfig)


def sections() -> dict[str, type]:
    """Map each section's name in Config to its dataclass."""
    return get_type_hints(Config)


def section_title(section: type) -> str:
    """The docstring of an option section, which help and docs/flags.md print as its title."""
    assert section.__doc__ is not None
    return section.__doc__.strip()


def all_options() -> dict[str, tuple[str, Any]]:
    """Map each option's name to its section in Config and its dataclass field."""
    options: dict[str, tuple[str, Any]] = {}
    for name, section in sections().items():
        for item in fields(section):
            assert item.name not in options, f"option {item.name} is declared twice"
            options[item.name] = (name, item)
    return options


def image_weights(loss: LossConfig) -> dict[str, float]:
    """The weight of each image term by its name, such as `perceptual`; 0: the loss is without it."""
    names = [item.name for item in fields(loss) if item.metadata.get("term") == "image"]
    return {name.removesuffix("_weight"): getattr(loss, name) for name in names}


def names_where(fact: str, value: bool = True) -> list[str]:
    """The options with this value in their declaration, such as "changes_samples"."""
    return [name for name, (_, item) in all_options().items() if item.metadata[fact] == value]


def flatten(config: Config) -> OptionValues:
    """All options of `config` by name, as plain data that a checkpoint can store: without credentials."""
    plain = {}
    for name, section in sections().items():
        for item in fields(section):
            value = getattr(getattr(config, name), item.name)
            plain[item.name] = list(value) if isinstance(value, tuple) else value
    return public_options(plain)


def build(values: OptionValues) -> Config:
    """A Config from option values by name, which `coerce` checks; missing options get their defaults."""
    options = all_options()
    parts: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    for name, value in values.items():
        section, item = options[name]
        parts[section][name] = coerce(item, value)
    return Config(**{name: section(**parts[name]) for name, section in sections().items()})
