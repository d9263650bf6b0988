"""Every option of a training run: its default, its unit and its help, each declared once.

Flags, JSON files, checkpoints and docs/flags.md all come from these fields.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

MAX_PIXELS = 300_000_000  # of one image file: 0.9 GB of decoded RGB
LEAST_IMAGE_SIZE = 11  # px: the window of SSIM (Wang et al. 2004), which every validation measures
# What is thrown away in a forward and computed again in the backward, from the fastest to the smallest.
RECOMPUTE = ("none", "activations", "top_level", "encoder", "blocks", "blocks_encoder", "all")


def option(
    default: Any,
    help: str,
    *,
    choices: tuple | None = None,
    metavar: str | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    auto: bool = False,
) -> Any:
    """A dataclass field that knows its help text and the values it admits (`auto`: a number or "auto")."""
    limits = {"at_least": at_least, "at_most": at_most, "auto": auto}
    return field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar, **limits})


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the autoencoder and where its first weights come from."""

    channels: tuple[int, ...] = option(
        (128, 256, 512, 512),
        "widths per level; one level more halves the latent's sides once more",
        at_least=1,
    )
    layers_per_block: int = option(
        2, "residual blocks per encoder level; the decoder has one more", at_least=1
    )
    z_channels: int = option(16, "latent channels", at_least=1)
    norm_groups: int = option(32, "groups of every GroupNorm; must divide each width", at_least=1)
    use_quant_conv: bool = option(
        False, "1x1 convolutions before and after the latent, as in SD 1.x and SDXL"
    )
    latent_norm: bool = option(
        False, "carry fixed means and variances of 2x2 latent patches, as FLUX.2's files do; never trained"
    )
    init: str = option(
        "warm",
        "first weights: warm starts as a linear codec, default is PyTorch's",
        choices=("warm", "default"),
    )
    init_from: str | None = option(
        None, "start from an existing VAE: checkpoint, diffusers folder or .safetensors file", metavar="PATH"
    )


@dataclass(frozen=True)
class DataConfig:
    """Which images are read and how they become a batch."""

    data_path: str = option(
        "./data/train", "folder of training images, any depth, or its manifest.jsonl", metavar="PATH"
    )
    fold: int | None = option(
        None, "fold of the manifest that validates while the others train, instead of its split", at_least=0
    )
    val_path: str | None = option(
        None, "a validation folder of your own, instead of --val_split", metavar="DIR"
    )
    val_split: float = option(
        0.1,
        "share of --data_path held out for validation, chosen by hash of name and seed",
        at_least=0,
        at_most=0.9,
    )
    max_val_images: int = option(256, "at most this many images in one validation; 0: all", at_least=0)
    image_size: int = option(512, "side of the square training crops, px", at_least=LEAST_IMAGE_SIZE)
    crop: str = option("random", "which part of a larger image is trained on", choices=("random", "center"))
    horizontal_flip: bool = option(True, "mirror half of the training crops")
    upscale: bool = option(False, "enlarge images smaller than --image_size; otherwise they are rejected")
    background: str = option("white", "what shows through transparent pixels: a colour name or #rrggbb")
    max_pixels: int = option(
        MAX_PIXELS, "images with more pixels are rejected before they are decoded", at_least=64
    )
    max_bad_fraction: float = option(
        0.05, "stop when more than this share of the training images is unusable", at_least=0, at_most=1
    )
    num_workers: str = option(
        "auto",
        "decoding processes; auto: usable cores minus 2, between 1 and 12",
        metavar="N",
        auto=True,
        at_least=0,
    )
    prefetch_factor: int = option(4, "batches decoded ahead per worker", at_least=1)
    persistent_workers: bool = option(True, "keep the decoding processes between epochs")


@dataclass(frozen=True)
class LossConfig:
    """The terms of the training loss and their weights."""

    reconstruction_loss: str = option(
        "l1", "per-pixel term, mean over values in [-1, 1]", choices=("l1", "mse")
    )
    reconstruction_weight: float = option(1.0, "weight of the per-pixel term", at_least=0)
    perceptual_weight: float = option(1.0, "weight of LPIPS; 0 needs no downloaded network", at_least=0)
    perceptual_net: str = option(
        "vgg",
        "network of LPIPS; random is vgg with random weights, for tests and trials only",
        choices=("vgg", "alex", "squeeze", "random"),
    )
    perceptual_weights: str | None = option(
        None, "file with the ImageNet weights of --perceptual_net, instead of the download", metavar="FILE"
    )
    kl_weight: float = option(
        1e-6,
        "weight of the KL divergence, in nats per image: summed over the latent, then mean over images",
        at_least=0,
    )
    adversarial_weight: float = option(0.0, "weight of the adversarial term; 0: no discriminator", at_least=0)
    disc_start: int = option(5000, "optimizer step at which the discriminator and its term begin", at_least=0)
    disc_ramp: int = option(1000, "steps over which the adversarial term grows to its weight", at_least=0)
    disc_max_weight: float = option(
        100.0,
        "upper clamp of the adaptive factor (ratio of reconstruction to adversarial gradient)",
        at_least=0,
    )
    disc_channels: int = option(64, "width of the first layer of the PatchGAN discriminator", at_least=1)
    disc_layers: int = option(3, "strided layers of the PatchGAN discriminator", at_least=1)
    disc_learning_rate: float = option(1e-4, "learning rate of the discriminator", at_least=0)


@dataclass(frozen=True)
class OptimConfig:
    """How weights follow gradients."""

    learning_rate: float = option(1e-4, "peak learning rate of AdamW", at_least=0)
    weight_decay: float = option(1e-5, "decoupled weight decay of AdamW", at_least=0)
    beta1: float = option(0.9, "AdamW's decay of the gradient mean", at_least=0, at_most=0.9999)
    beta2: float = option(0.99, "AdamW's decay of the squared-gradient mean", at_least=0, at_most=0.99999)
    lr_schedule: str = option(
        "cosine", "course of the learning rate within a stage", choices=("cosine", "constant", "onecycle")
    )
    warmup_epochs: float = option(
        5, "epochs of linear warm-up at the start of a stage, at most a fifth of it", at_least=0
    )
    gradient_clip: float = option(1.0, "largest norm of the whole gradient; 0: no clipping", at_least=0)
    ema_decay: float = option(
        0.999,
        "decay of the averaged weights that are validated and shipped; 0: off",
        at_least=0,
        at_most=0.99999,
    )
    train_part: str = option(
        "all",
        "what is trained; decoder: the encoder stays as it is, so latents stay the same, and needs no graph",
        choices=("all", "decoder"),
    )
    max_nonfinite_steps: int = option(50, "stop after this many non-finite steps in a row", at_least=1)


@dataclass(frozen=True)
class SpeedConfig:
    """Precision and speed; none of these changes what is trained, only rounding and time."""

    mixed_precision: bool = option(
        False, "bf16 where the device has it, else fp16 with loss scaling; which one is printed"
    )
    use_bf16: bool = option(False, "bf16, or an error where the device lacks it")
    enable_tf32: bool = option(True, "TF32 for fp32 matrix products and convolutions on NVIDIA cards")
    channels_last: bool = option(True, "NHWC memory layout")
    use_torch_compile: bool = option(False, "compile the networks with torch.compile")
    micro_batch_size: str = option(
        "auto",
        "images per pass, at most the batch; auto: as many as the memory holds; never changes the gradient",
        metavar="N",
        auto=True,
        at_least=1,
    )
    recompute: str = option(
        "auto",
        "what is computed again in the backward instead of kept, from fastest to smallest; auto: the fastest "
        "that fits; never changes the gradient (docs/memory.md)",
        choices=("auto", *RECOMPUTE),
    )
    vram_margin: float = option(
        0.98,
        "share of the free device memory that --recompute auto and --micro_batch_size auto may plan with",
        at_least=0.1,
        at_most=1,
    )
    device: str = option("auto", "cuda, cpu or auto", choices=("auto", "cuda", "cpu"))
    profile_steps: int = option(0, "write a torch profiler trace and table of this many steps", at_least=0)


@dataclass(frozen=True)
class RunConfig:
    """How long, how much at a time, what is written and where."""

    config: str | None = option(None, "JSON file of options; a flag beats it", metavar="FILE")
    profile: str | None = option(None, "a named recipe; --list_profiles shows them", metavar="NAME")
    output_dir: str = option("./outputs", "folder of the run", metavar="DIR")
    resume_from: str | None = option(
        None, "checkpoint to go on from; latest: the newest valid one in --output_dir", metavar="PATH|latest"
    )
    new_stage: bool = option(False, "with --resume_from latest: begin a new stage where the run is finished")
    batch_size: int = option(4, "images per device and optimizer step", at_least=1)
    accumulation_steps: int = option(1, "batches added up before each optimizer step", at_least=1)
    num_epochs: int = option(100, "epochs of the stage", at_least=1)
    max_steps: int | None = option(None, "stop when the run has made this many optimizer steps", at_least=1)
    progressive: str | None = option(
        None, "several stages in one command, SIZE:EPOCHS:BATCH separated by commas", metavar="LIST"
    )
    checkpoint_freq: int = option(1, "epochs between checkpoints", at_least=1)
    checkpoint_steps: int = option(0, "optimizer steps between extra checkpoints; 0: none", at_least=0)
    keep_checkpoints: int = option(3, "checkpoints kept besides the best and each stage's last", at_least=2)
    save_samples_freq: int = option(100, "optimizer steps between sample sheets; 0: none", at_least=0)
    val_freq: int = option(1, "epochs between validations", at_least=1)
    log_freq: int = option(10, "optimizer steps between log records", at_least=1)
    early_stopping: int = option(
        0, "stop after this many validations without a better PSNR; 0: off", at_least=0
    )
    seed: int = option(0, "seed of weights, order, crops and noise", at_least=0, at_most=2**63 - 1)


@dataclass(frozen=True)
class Config:
    """Everything a training run is told; a room of the package takes its own part, never the whole."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    run: RunConfig = field(default_factory=RunConfig)


def all_options() -> dict[str, tuple[str, Any]]:
    """Map each option's name to its section in Config and its dataclass field."""
    found: dict[str, tuple[str, Any]] = {}
    for section in fields(Config):
        for item in fields(section.default_factory):
            assert item.name not in found, f"option {item.name} is declared twice"
            found[item.name] = (section.name, item)
    return found


def flatten(config: Config) -> dict[str, Any]:
    """All options of `config` as plain data, by name: what a checkpoint stores."""
    plain = {}
    for section in fields(config):
        part = getattr(config, section.name)
        assert is_dataclass(part)
        for item in fields(part):
            value = getattr(part, item.name)
            plain[item.name] = list(value) if isinstance(value, tuple) else value
    return plain


def build(values: dict[str, Any]) -> Config:
    """Config from option values by name; what is not named keeps its default."""
    options = all_options()
    sections: dict[str, dict[str, Any]] = {section.name: {} for section in fields(Config)}
    for name, value in values.items():
        section, item = options[name]
        sections[section][name] = tuple(value) if isinstance(item.default, tuple) else value
    return Config(**{s.name: s.default_factory(**sections[s.name]) for s in fields(Config)})
