"""A command with --probe_profile, from top to bottom: labels, plan, latents, training, results.

Shapes: N validation images, K classes.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vae.classifier.batches import CachedSet, channel_statistics
from vae.classifier.labelled import LabelledSet, read_sets
from vae.classifier.latent_cache import LatentCache, encode_set
from vae.classifier.memory import ClassifierMemory, ClassifierSpec, choose_micro_batch
from vae.classifier.network import LatentClassifier, NetworkShape, check_shape
from vae.classifier.recipe import (
    Recipe,
    TrainingState,
    begin,
    forward_of,
    identity_of,
    load_state,
    predict,
    save_state,
    train_epoch,
)
from vae.config.evaluate_flags import EvaluateConfig
from vae.device import DTYPES, is_out_of_memory, pick_device, precision_support
from vae.evaluation.compare import short_names
from vae.evaluation.precheck import check_command
from vae.evaluation.probe.run import pair_line, score_table, write_probabilities
from vae.evaluation.probe.scores import compared_with_first, scores
from vae.interop.vae_files import LoadedVae, load_vae
from vae.memory.available import available_bytes, cuda_reserve
from vae.ops.kernel_check import choose_kernels
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import write_json
from vae.system.host import GIB
from vae.training.output.folder_lock import FolderLock
from vae.training.precision import why_not_compile


@dataclass(frozen=True)
class Setup:
    """What all classifiers of a command share."""

    config: EvaluateConfig
    recipe: Recipe
    classes: list[str]
    device: torch.device
    dtype: torch.dtype  # of the classifier's layers
    is_compiled: bool


@dataclass
class Measured:
    """One VAE, and the probabilities of its classifier."""

    name: str
    data: CachedSet  # of the validation images
    probabilities: np.ndarray  # (N, K)
    history: list[dict[str, float]]
    scores: dict[str, Any]


def run_profile(config: EvaluateConfig) -> None:
    """Train a classifier on the latents of each VAE, and print and write the results."""
    check_command(config)
    device = pick_device(config.device)
    torch.backends.cudnn.allow_tf32 = False  # --dtype fp32 means fp32, not TF32
    torch.backends.cudnn.benchmark = True  # shapes are constant
    choose_kernels(config.kernels, device, [DTYPES[config.dtype]])
    vaes = [load_vae(Path(path), flag="--vae", weights=config.weights) for path in config.vae]
    for vae in vaes:
        check_shape(_shape(config, vae, num_classes=2))
    classes, train, val = read_sets(config)
    dtype = (
        torch.bfloat16
        if device.type == "cuda" and precision_support(device).bf16 == "native"
        else torch.float32
    )
    setup = Setup(
        config, _recipe(config, len(train.indices)), classes, device, dtype, _is_compiled(config, device)
    )
    console.info(
        f"{len(train.indices)} training and {len(val.indices)} validation images, {len(classes)} classes"
    )
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock() as lock:
        lock.acquire(folder)
        measured = [
            _measure(setup, number, name, vae, train, val)
            for number, (name, vae) in enumerate(zip(short_names(config.vae), vaes, strict=True))
        ]
        _write(folder, setup, val, measured)
        for number in range(len(vaes)):
            _state_path(folder, number).unlink(missing_ok=True)


def _recipe(config: EvaluateConfig, images: int) -> Recipe:
    assert config.probe_learning_rate is not None  # the profile has one
    return Recipe(
        epochs=config.probe_epochs,
        learning_rate=config.probe_learning_rate,
        batch_size=min(config.probe_batch_size, images),
        warmup_epochs=config.probe_warmup_epochs,
        weight_decay=config.probe_weight_decay,
        label_smoothing=config.probe_label_smoothing,
        ema_decay=config.probe_ema_decay,
        seed=config.seed,
    )


def _shape(config: EvaluateConfig, vae: LoadedVae, num_classes: int) -> NetworkShape:
    model = vae.autoencoder
    side = -(-config.sizes[0] // model.downsampling)
    widths, depths = config.probe_widths, config.probe_depths
    return NetworkShape(config.probe_heads[0], model.config.z_channels, side, num_classes, widths, depths)


def _is_compiled(config: EvaluateConfig, device: torch.device) -> bool:
    """Whether the classifier is compiled; UserError if it was asked for and cannot be."""
    if config.probe_compile is False or (config.probe_compile is None and device.type != "cuda"):
        return False
    reason = why_not_compile(device, config.kernels)
    if reason is None:
        return True
    if config.probe_compile:
        raise UserError(f"--probe_compile: {reason}: remove the flag")
    console.info(f"the classifier is not compiled, which is slower: {reason}")
    return False


def _plan(setup: Setup, shape: NetworkShape) -> ClassifierMemory:
    """The step's memory at its micro-batch, which is printed."""
    is_gpu = setup.device.type == "cuda"
    reserve = cuda_reserve() if is_gpu else 0
    spec = ClassifierSpec(shape, setup.recipe.batch_size, setup.dtype, setup.recipe.ema_decay > 0, reserve)
    available = available_bytes(setup.device)
    memory = choose_micro_batch(spec, available, setup.config.probe_micro_batch_size)
    passes = -(-spec.batch // memory.micro_batch)
    parts = "one pass" if passes == 1 else f"{passes} passes of up to {memory.micro_batch}"
    console.info(
        f"{shape.head}: {spec.batch} images per step in {parts}; "
        f"planned {memory.total / GIB:.1f} of {available / GIB:.1f} GiB"
    )
    return memory


def _state_path(folder: Path, number: int) -> Path:
    return folder / f"probe_state_{number}.pt"


def _measure(
    setup: Setup, number: int, name: str, vae: LoadedVae, train: LabelledSet, val: LabelledSet
) -> Measured:
    """Encode what is missing, train what is missing, and score the validation images."""
    config, folder = setup.config, Path(setup.config.output_dir)
    shape = _shape(config, vae, len(setup.classes))
    memory = _plan(setup, shape)
    cache = Path(config.probe_cache) if config.probe_cache else folder / "latents"
    model = vae.autoencoder.to(setup.device).to(memory_format=torch.channels_last)
    with _memory_flag("--batch_size", config.batch_size):
        caches = [
            encode_set(labelled, model, config, views, cache)
            for labelled, views in ((train, config.probe_views), (val, 1))
        ]
    sets = [_cached(*pair) for pair in zip((train, val), caches, strict=True)]
    model.cpu()
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()
    made = identity_of(
        setup.recipe,
        **asdict(shape),
        images=caches[0].identity | {"val": caches[1].identity["images"]},
        class_names=hashlib.sha256("\n".join(setup.classes).encode("utf-8", "surrogateescape")).hexdigest(),
        dtype=str(setup.dtype),
        micro_batch=config.probe_micro_batch_size,
    )
    with _memory_flag("--probe_micro_batch_size", memory.micro_batch):
        return _train(setup, name, shape, memory, sets[0], sets[1], _state_path(folder, number), made)


@contextmanager
def _memory_flag(flag: str, value: int) -> Iterator[None]:
    """Name the flag to lower if the memory runs out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"{flag} {value}: out of memory: try {flag} {max(1, value // 2)}") from None


def _cached(labelled: LabelledSet, cache: LatentCache) -> CachedSet:
    """The set without its unusable images, which are reported."""
    unusable = [int(position) for position in cache.unusable]
    if unusable:
        example = console.printable(next(iter(cache.unusable.values())))
        console.warning(f"{labelled.flag}: {len(unusable)} images are left out, for example {example}")
    usable = np.setdiff1d(np.arange(len(labelled.indices)), unusable)
    return CachedSet(cache.latents, labelled.targets, usable)


def _train(
    setup: Setup,
    name: str,
    shape: NetworkShape,
    memory: ClassifierMemory,
    train: CachedSet,
    val: CachedSet,
    path: Path,
    made: dict[str, Any],
) -> Measured:
    """All epochs from the saved state on, with a validation and a checkpoint after each."""
    recipe = setup.recipe
    state = _begin(setup, name, shape, memory, train, path, made)
    forward = forward_of(state.model, setup.dtype, setup.is_compiled)
    measure = forward_of(state.measured, setup.dtype, setup.is_compiled)
    targets, found = val.targets[val.usable], None
    while len(state.history) < recipe.epochs:
        epoch = len(state.history) + 1
        train_epoch(state, forward, train, recipe, f"epoch {epoch} of {recipe.epochs}")
        found = predict(state.measured, measure, val, state.micro_batch)
        record = state.history[-1]
        record["top1"] = float((found.argmax(1) == targets).mean())
        record["log_loss"] = float(-np.log(found[np.arange(len(found)), targets]).mean())
        save_state(path, state, made)
        console.info(
            f"{console.printable(name)}: epoch {epoch} of {recipe.epochs}, loss {record['loss']:.3f}, "
            f"validation top-1 {record['top1']:.1%}, log loss {record['log_loss']:.3f}"
        )
    if found is None:
        found = predict(state.measured, measure, val, state.micro_batch)
    return Measured(name, val, found, state.history, scores(targets, found))


def _begin(
    setup: Setup,
    name: str,
    shape: NetworkShape,
    memory: ClassifierMemory,
    train: CachedSet,
    path: Path,
    made: dict[str, Any],
) -> TrainingState:
    """The saved state, or a new one."""

    def new() -> TrainingState:
        with torch.random.fork_rng():
            torch.manual_seed(setup.recipe.seed)
            model = LatentClassifier(shape, *channel_statistics(train))
        model.to(setup.device).to(memory_format=torch.channels_last)
        return begin(model, setup.recipe, memory.micro_batch)

    state = new()
    if not path.exists():
        return state
    try:
        load_state(path, state, made)
    except UserError:
        if not setup.config.overwrite:
            raise
        return new()
    done = f"continues after epoch {len(state.history)} of {setup.recipe.epochs}"
    console.info(f"{console.printable(name)}: {done}")
    if state.micro_batch < memory.micro_batch:
        console.info(f"passes of {state.micro_batch} images, as before")
    return state


def _write(folder: Path, setup: Setup, val: LabelledSet, measured: list[Measured]) -> None:
    """Write probe.json and one CSV file of probabilities for each VAE, and print the tables."""
    head = setup.config.probe_heads[0]
    data = measured[0].data  # all have the same images
    pairs = compared_with_first(
        [one.name for one in measured],
        [one.probabilities for one in measured],
        data.targets[data.usable],
        data.usable,
    )
    content = {
        "profile": setup.config.probe_profile,
        "classes": setup.classes,
        "images": len(data),
        "recipe": asdict(setup.recipe),
        "sets": {
            f"{one.name} latents": {"scores": {head: one.scores}, "epochs": one.history} for one in measured
        },
        "pairs": pairs,
    }
    for number, one in enumerate(measured):
        names = [val.images.name(index) for index in val.indices[one.data.usable].tolist()]
        write_probabilities(folder / f"probe_{number}.csv", names, setup.classes, one.probabilities)
    write_json(folder / "probe.json", content, indent=1)
    table = score_table(setup.classes, {f"{one.name} latents": {head: one.scores} for one in measured})
    console.info("\n".join(["", *table, *map(pair_line, pairs)]))
    console.info(f"\nresults are in {console.printable(setup.config.output_dir)}")
