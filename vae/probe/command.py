"""A command with --probe or --probe_profile, from top to bottom: labels, latents, heads, scores, files.

Shapes: N measured images, K classes.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vae.config.evaluate_flags import EvaluateConfig
from vae.device import DTYPES, is_out_of_memory, pick_device, precision_support
from vae.evaluation.compare import short_names
from vae.evaluation.precheck import check_command
from vae.interop.vae_files import LoadedVae, load_vae
from vae.memory.available import CUDA_RESERVE, available_bytes
from vae.ops.kernel_check import choose_kernels
from vae.probe.labels import LabelledSet, folds_of, read_sets
from vae.probe.latents import encode_set
from vae.probe.linear import linear_probabilities
from vae.probe.maps import MapSet
from vae.probe.memory import choose_micro_batch
from vae.probe.network import NetworkShape, recipe_of
from vae.probe.pixels import MapsOf, maps_of_pixels, maps_of_recon, positions_of
from vae.probe.reference import choose_reference, describe, load_reference
from vae.probe.scores import compared_with_first, score_lines, scores, write_probabilities
from vae.probe.training import Training
from vae.system import console
from vae.system.console import printable
from vae.system.errors import UserError
from vae.system.files import write_json
from vae.system.host import GIB
from vae.training.precision import why_not_compile


@dataclass(frozen=True)
class Probe:
    """What all kinds of maps of a command share."""

    config: EvaluateConfig
    classes: list[str]
    sets: list[LabelledSet]  # with --probe_profile: for training and for validation, otherwise one
    folds: np.ndarray | None  # int64, of the images of the one set
    device: torch.device
    dtype: torch.dtype  # of the network's layers
    is_compiled: bool


@dataclass
class Kind:
    """One kind of maps (latents, pixels or reconstructions), and what the heads find in them."""

    name: str
    heads: Sequence[str]
    sets: Sequence[MapSet]  # with --probe_profile: for training and for validation, otherwise one
    vae: str | None = None  # if they are the latents of a VAE
    identity: str | None = None  # all that decides the maps; a training on them continues
    probabilities: dict[str, np.ndarray] = field(default_factory=dict)  # head -> (N, K)
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    epochs: list[dict[str, float]] = field(default_factory=list)  # of a network whose training continues


def run_probe(config: EvaluateConfig) -> None:
    """Train heads on the latents of each VAE, and print and write the results."""
    check_command(config)
    device = pick_device(config.device)
    torch.backends.cudnn.allow_tf32 = False  # --dtype fp32 means fp32, not TF32
    torch.backends.cudnn.benchmark = True  # shapes are constant
    choice = config.probe_reference if config.probe_profile is None else "none"
    reference = choose_reference(choice)
    pretrained = load_reference(reference, device) if reference else None
    choose_kernels(config.kernels, device, [DTYPES[config.dtype]])
    vaes = [load_vae(Path(path), flag="--vae", weights=config.weights) for path in config.vae]
    for vae in vaes:
        side = -(-config.sizes[0] // vae.autoencoder.downsampling)
        NetworkShape(vae.autoencoder.config.z_channels, side, 2, recipe_of(config, 2)).check()
    classes, sets = read_sets(config)
    folds = None
    if config.probe_profile is None:
        folds = folds_of(sets[0], classes, f"--probe {config.probe}", config.probe_folds)
        console.info(describe(reference, choice))
    is_bf16 = device.type == "cuda" and precision_support(device).bf16 == "native"
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    probe = Probe(config, classes, sets, folds, device, dtype, _is_compiled(config, device))
    counts = " and ".join(f"{len(labelled.targets)} images in {labelled.flag}" for labelled in sets)
    in_folds = "" if folds is None else f", {len(set(sets[0].groups))} groups, {folds.max() + 1} folds"
    console.info(f"{counts}, {len(classes)} classes{in_folds}")
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    kinds = []
    for kind in _latents(probe, vaes) if folds is None else _maps(probe, vaes, pretrained):
        _measure(probe, kind)
        kinds.append(kind)
    _write(Path(config.output_dir), probe, reference, kinds)


def _is_compiled(config: EvaluateConfig, device: torch.device) -> bool:
    """Whether the network is compiled; UserError if it was asked for and cannot be."""
    is_default = device.type == "cuda" and config.probe_profile is not None
    if not (is_default if config.probe_compile is None else config.probe_compile):
        return False
    reason = why_not_compile(device, config.kernels)
    if reason is not None and config.probe_compile:
        raise UserError(f"--probe_compile: {reason}: remove the flag")
    if reason is not None:
        console.info(f"the network is not compiled, which is slower: {reason}")
    return reason is None


@contextmanager
def _memory_flag(flag: str, value: int) -> Iterator[None]:
    """Name the flag to lower if the memory runs out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"{flag} {value}: out of memory: try {flag} {max(1, value // 2)}") from None


def _encoded(probe: Probe, vae: LoadedVae, views: Sequence[int]) -> list[tuple[str, MapSet]]:
    """The name and the latents of each set; the VAE is on the device."""
    config = probe.config
    model = vae.autoencoder.to(probe.device).to(memory_format=torch.channels_last)
    folder = Path(config.probe_cache or Path(config.output_dir, "latents"))
    with _memory_flag("--batch_size", config.batch_size):
        sets = zip(probe.sets, views, strict=True)
        return [encode_set(labelled, model, config, count, folder) for labelled, count in sets]


def _release(probe: Probe, vae: LoadedVae) -> None:
    vae.autoencoder.cpu()
    if probe.device.type == "cuda":
        torch.cuda.empty_cache()


def _latents(probe: Probe, vaes: Sequence[LoadedVae]) -> Iterator[Kind]:
    """The latents of the training set and the validation set, of each VAE."""
    config = probe.config
    for name, vae in zip(short_names(config.vae), vaes, strict=True):
        caches, sets = zip(*_encoded(probe, vae, (config.probe_views, 1)), strict=True)
        _release(probe, vae)
        yield Kind(f"{name} latents", config.probe_heads, sets, name, " ".join(caches))


def _maps(probe: Probe, vaes: Sequence[LoadedVae], pretrained: MapsOf | None) -> Iterator[Kind]:
    """The pixels, then the latents and the reconstructions of each VAE."""
    config, device = probe.config, probe.device
    heads = ("linear",) if pretrained else config.probe_heads
    for number, (name, vae) in enumerate(zip(short_names(config.vae), vaes, strict=True)):
        ((_, latents),) = _encoded(probe, vae, (1,))
        maps_of = pretrained or partial(positions_of, factor=vae.autoencoder.downsampling)
        if number == 0:
            pixels = maps_of_pixels(probe.sets[0], config, maps_of, device)
            yield Kind("pixels", heads, [replace(latents, maps=pixels)])
        recon = maps_of_recon(latents.maps, vae.autoencoder, config, maps_of, device)
        _release(probe, vae)
        yield Kind(f"{name} latents", config.probe_heads, [latents], name)
        yield Kind(f"{name} recon", heads, [replace(latents, maps=recon)])


def _splits(probe: Probe, kind: Kind) -> list[tuple[MapSet, MapSet]]:
    """The images that train and those that are measured: the validation set, or each fold in turn."""
    if probe.folds is None:
        return [(kind.sets[0], kind.sets[1])]
    whole = kind.sets[0]
    of_fold = [probe.folds[whole.chosen] == fold for fold in range(probe.folds.max() + 1)]
    return [
        (replace(whole, chosen=whole.chosen[~part]), replace(whole, chosen=whole.chosen[part]))
        for part in of_fold
    ]


def _measure(probe: Probe, kind: Kind) -> None:
    """Train every head on every split, and score the probabilities of the measured images."""
    splits = _splits(probe, kind)
    order = np.argsort(np.concatenate([measured.chosen for _, measured in splits]))
    for head in kind.heads:
        if head == "linear":
            parts = [linear_probabilities(*split, len(probe.classes)) for split in splits]
        else:
            parts = [_by_network(probe, kind, *split) for split in splits]
        kind.probabilities[head] = np.concatenate(parts)[order]
    if len(kind.heads) > 1:
        kind.probabilities["ensemble"] = np.mean(list(kind.probabilities.values()), axis=0)
    targets = kind.sets[-1].targets[kind.sets[-1].chosen]
    kind.scores = {head: scores(targets, values) for head, values in kind.probabilities.items()}


def _by_network(probe: Probe, kind: Kind, train: MapSet, measured: MapSet) -> np.ndarray:
    """Probabilities (N, K) by the network; if its training continues, each epoch is validated and saved."""
    config, device = probe.config, probe.device
    channels, side = train.maps.shape[2:4]
    shape = NetworkShape(channels, side, len(probe.classes), recipe_of(config, len(train)))
    reserve = CUDA_RESERVE if device.type == "cuda" else 0
    available = available_bytes(device) - reserve
    micro_batch, needed = choose_micro_batch(shape, probe.dtype, available, config.probe_micro_batch_size)
    with _memory_flag("--probe_micro_batch_size", micro_batch):
        training = Training(shape, train, device, probe.dtype, micro_batch, config.seed, probe.is_compiled)
        state = None
        if kind.identity is not None:
            step = f"{shape.recipe.batch_size} images per step, {micro_batch} in a pass"
            planned = f"{(needed + reserve) / GIB:.1f} of {(available + reserve) / GIB:.1f} GiB"
            console.info(f"{printable(kind.name)}: {step}; planned {planned}")
            state = _state_path(probe, kind, shape)
            if state.exists():
                training.load(state)
                done = f"continues after epoch {len(training.epochs)} of {shape.recipe.epochs}"
                console.info(f"{printable(kind.name)}: {done}")
        while not training.is_complete:
            training.train_epoch(printable(kind.name))
            if state is not None:
                _validate(training, kind, measured)
                training.save(state)
        kind.epochs = [] if state is None else training.epochs
        return training.predict(measured)


def _state_path(probe: Probe, kind: Kind, shape: NetworkShape) -> Path:
    """The file for the state of a training; its name is a hash of all that decides the training."""
    labels = [hashlib.sha256(maps.targets.tobytes()).hexdigest() for maps in kind.sets]
    decides = [kind.identity, labels, asdict(shape), probe.classes, str(probe.dtype), probe.config.seed]
    text = json.dumps([*decides, probe.config.probe_micro_batch_size])
    return Path(probe.config.output_dir, f"probe_{hashlib.sha256(text.encode()).hexdigest()[:16]}.pt")


def _validate(training: Training, kind: Kind, val: MapSet) -> None:
    """Add the scores of an epoch to its record, and print them."""
    values, targets, record = training.predict(val), val.targets[val.chosen], training.epochs[-1]
    record["top1"] = float((values.argmax(1) == targets).mean())
    record["log_loss"] = float(-np.log(values[np.arange(len(values)), targets]).mean())
    console.info(
        f"{printable(kind.name)}: epoch {record['epoch']} of {training.recipe.epochs}, loss "
        f"{record['loss']:.3f}, validation top-1 {record['top1']:.1%}, log loss {record['log_loss']:.3f}"
    )


def _write(folder: Path, probe: Probe, reference: str | None, kinds: Sequence[Kind]) -> None:
    """Write probe.json and one CSV file of probabilities for each kind of maps, and print the tables."""
    measured = kinds[0].sets[-1]  # all kinds have the same images
    last = [list(kind.probabilities.values())[-1] for kind in kinds]  # the ensemble, if there is one
    of_vaes = {kind.vae: values for kind, values in zip(kinds, last, strict=True) if kind.vae is not None}
    groups = measured.groups[measured.chosen]
    pairs = compared_with_first(of_vaes, measured.targets[measured.chosen], groups)
    names = probe.sets[-1].names(measured.chosen)
    for number, values in enumerate(last):
        write_probabilities(folder / f"probe_{number}.csv", names, probe.classes, values)
    content = {
        "profile": probe.config.probe_profile,
        "classes": probe.classes,
        "images": len(names),
        "groups": len(set(groups.tolist())),
        "folds": None if probe.folds is None else int(probe.folds.max()) + 1,
        "reference": reference,
        "recipe": asdict(recipe_of(probe.config, len(kinds[0].sets[0]))),
        "sets": {kind.name: {"scores": kind.scores, "epochs": kind.epochs} for kind in kinds},
        "pairs": pairs,
    }
    write_json(folder / "probe.json", content, indent=1)
    for state in folder.glob("probe_*.pt"):
        state.unlink()
    lines = score_lines(probe.classes, {kind.name: kind.scores for kind in kinds}, pairs)
    console.info("\n".join(lines))
    console.info(f"\nresults are in {printable(probe.config.output_dir)}")
