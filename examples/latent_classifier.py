"""Train classifiers on the latents of a VAE: what do its latents still know about an image?

    python examples/latent_classifier.py --vae outputs/first/vae --data photos --output results/classifier

`photos` has a folder of images for each class. Each image is encoded once. Two heads are trained on the
latents: a ConvNeXt or ResNet of torchvision, and scikit-learn's logistic regression. Every image is measured
once: each fold in turn, by heads that the other folds trained, or with --val the images of that folder. The
ensemble is a weighted mean of both heads; the weight for a fold is the best one for the other folds. To
compare VAEs, give several: they see the same images in the same folds.

The defaults are a recipe for ImageNet on a card with 16 GB: ConvNeXt-T (Liu et al. 2022, table 5) in bf16,
without RandAugment and CutMix. For a small set: --network resnet18 --epochs 30 --batch_size 64 --min_crop 0.5

Shapes: N images, V views of each, B images of a batch, Z channels of h x h latent positions, K classes.
"""

import argparse
import csv
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, log_loss
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.models import get_model
from torchvision.transforms import v2
from tqdm import tqdm

sys.path.insert(0, os.getcwd())  # the package `vae` is in the repository's root

import vae

VIEWS = 2  # the square and its mirror image
POSITIONS = 32  # side of the network's first stage: larger latents are cut into patches, as images are
MIN_POSITIONS = 8  # the networks halve the first stage three times
DROP_PATH = 0.1  # of ConvNeXt's last block; layer scale is torchvision's 1e-6
MAX_GRADIENT = 5.0  # norm at which gradients are clipped, as for Swin (Liu et al. 2021)
STATISTICS_IMAGES = 1024  # for the mean and the standard deviation of each channel
LINEAR_SIDE = 8  # of the averaged map that the linear head sees
LINEAR_IMAGES = 50_000  # evenly spread training images of the linear head, which has them all in memory
LINEAR_STRENGTH = 0.01  # C of LogisticRegression
SHARES = np.linspace(0, 1, 21).tolist()  # of the network in the ensemble


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], formatter_class=defaults)
    add = parser.add_argument
    add("--vae", required=True, nargs="+", help="checkpoints, diffusers folders or .safetensors files")
    add("--data", required=True, type=Path, help="folder with a folder of images for each class")
    add("--val", type=Path, help="folder like --data: measure these images instead of folds of --data")
    add("--output", required=True, type=Path, help="folder for results, probabilities and cached latents")
    add("--size", type=int, default=256, help="side of the squares that are encoded, px")
    add("--folds", type=int, default=5, help="number of folds")
    add("--network", default="convnext_tiny", help="a ConvNeXt or ResNet of torchvision.models")
    add("--epochs", type=int, default=90, help="epochs of the network")
    add("--warmup_epochs", type=float, default=5, help="epochs of the one-cycle schedule with a rising rate")
    add("--learning_rate", type=float, default=1e-3, help="highest rate of the one-cycle schedule")
    add("--weight_decay", type=float, default=0.05, help="of matrices and convolutions")
    add("--batch_size", type=int, default=1024, help="images of an optimizer step")
    add("--micro_batch", type=int, default=512, help="images of a forward pass; the gradients are summed")
    add("--mixup", type=float, default=0.8, help="alpha of MixUp")
    add("--label_smoothing", type=float, default=0.1, help="share of the target that all classes get")
    add("--erasing", type=float, default=0.25, help="share of the latents that lose a random region")
    add("--min_crop", type=float, default=0.08, help="smallest area of random crops of the latents; 1: none")
    add("--ema_decay", type=float, default=0.9999, help="of the averaged weights, which are measured")
    add("--encode_batch", type=int, default=16, help="images to encode at once")
    add("--num_workers", type=int, default=4, help="processes that read latents")
    add("--seed", type=int, default=0, help="of folds and training")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"), help="to compute on")
    arguments = parser.parse_args()
    if not arguments.network.startswith(("convnext_", "resnet")):
        parser.error(f"--network {arguments.network} is unknown: try convnext_tiny or resnet18")
    return arguments


def labelled_images(folder: Path, flag: str) -> ImageFolder:
    """The image files below each class folder."""
    try:
        images = ImageFolder(folder)
    except FileNotFoundError as error:
        raise vae.UserError(f"{flag} {folder} needs a folder of images for each class: {error}") from None
    if len(images.classes) < 2:
        raise vae.UserError(f"{flag} {folder} has a single class: it needs a folder for each of two or more")
    return images


def read_square(path: str, size: int) -> Image.Image:
    """The middle square of an image file, with sides of `size` px."""
    (image,) = vae.to_pil(vae.load_images(path))
    return ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)


def cached_latents(model: vae.LoadedVae, paths: Sequence[str], arguments: argparse.Namespace) -> Path:
    """The .npy file with the latents, fp16 (N, V, Z, h, h).

    Its name is a hash of the weights, the image files' names and sizes, and the size of the squares.
    """
    size = arguments.size
    batch = arguments.encode_batch
    digest = hashlib.sha256(repr([size, *((path, os.path.getsize(path)) for path in paths)]).encode())
    for tensor in model.autoencoder.state_dict().values():
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    done = arguments.output / "latents" / f"{digest.hexdigest()[:16]}.npy"
    if done.exists():
        return done
    done.parent.mkdir(parents=True, exist_ok=True)
    dtype = "bf16" if next(model.autoencoder.parameters()).is_cuda else "fp32"
    temporary = done.with_suffix(".partial")
    latents = None
    with ThreadPoolExecutor() as pool:
        for first in tqdm(range(0, len(paths), batch), "encoding", leave=False):
            squares = list(pool.map(lambda path: read_square(path, size), paths[first : first + batch]))
            views = [squares, [ImageOps.mirror(square) for square in squares]]
            encoded = [vae.encode(model, images, dtype=dtype).cpu().numpy() for images in views]
            values = np.stack(encoded, axis=1)  # (B, V, Z, h, h)
            if latents is None:
                shape = (len(paths), *values.shape[1:])
                latents = np.lib.format.open_memmap(temporary, "w+", np.float16, shape)
            latents[first : first + len(values)] = values
    del latents  # closes the file, which Windows needs before it is renamed
    os.replace(temporary, done)
    return done


@dataclass
class Latents(Dataset):
    """Standardized latents (Z, h, h) with the number of their class; with `augment`, in a random view."""

    file: Path
    targets: np.ndarray  # of all images in the file
    rows: np.ndarray  # numbers of the images in this set
    mean: Tensor
    std: Tensor
    augment: nn.Module | None = None
    stored: np.ndarray | None = None  # opened in each worker, because a memory map is pickled whole

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.stored is None:
            self.stored = np.load(self.file, mmap_mode="r")
        row = int(self.rows[index])
        view = int(torch.randint(VIEWS, ())) if self.augment else 0
        latents = (torch.from_numpy(self.stored[row, view].astype(np.float32)) - self.mean) / self.std
        return (self.augment(latents) if self.augment else latents), int(self.targets[row])


def build_network(name: str, channels: int, side: int, num_classes: int) -> nn.Module:
    """A network of torchvision for latents (B, channels, side, side): its stem keeps their positions."""
    patch = -(-side // POSITIONS)
    if side // patch < MIN_POSITIONS:
        raise vae.UserError(f"the latents have only {side} x {side} positions: give a larger --size")
    kernel, padding = (3, 1) if patch == 1 else (patch, 0)
    if name.startswith("convnext"):
        network = get_model(name, num_classes=num_classes, stochastic_depth_prob=DROP_PATH)
        width = network.features[0][0].out_channels
        network.features[0][0] = nn.Conv2d(channels, width, kernel, patch, padding)
    else:
        network = get_model(name, num_classes=num_classes)
        network.conv1 = nn.Conv2d(channels, network.conv1.out_channels, kernel, patch, padding, bias=False)
        network.maxpool = nn.Identity()
    return network


def train_network(plain: Latents, num_classes: int, arguments: argparse.Namespace) -> nn.Module:
    """The averaged weights after one cycle of the learning rate."""
    torch.manual_seed(arguments.seed)
    device = torch.device(arguments.device)
    latents, _ = plain[0]
    augment: list[nn.Module] = [v2.RandomErasing(arguments.erasing)]
    if arguments.min_crop < 1:
        area = (arguments.min_crop, 1.0)
        augment.insert(0, v2.RandomResizedCrop(latents.shape[-1], area, antialias=False))
    data = replace(plain, augment=nn.Sequential(*augment), stored=None)
    model = build_network(arguments.network, len(latents), latents.shape[-1], num_classes)
    model.to(device, memory_format=torch.channels_last).train()
    averaged = AveragedModel(model, multi_avg_fn=partial(moving_average, arguments.ema_decay))
    matrices = [weight for weight in model.parameters() if weight.ndim in (2, 4)]
    others = [weight for weight in model.parameters() if weight.ndim not in (2, 4)]  # norms, biases, scales
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, weight_decay=arguments.weight_decay)
    workers = {"num_workers": arguments.num_workers, "persistent_workers": arguments.num_workers > 0}
    loader = DataLoader(data, min(arguments.batch_size, len(data)), shuffle=True, drop_last=True, **workers)
    steps = len(loader) * arguments.epochs + 1
    rising = min(0.5, arguments.warmup_epochs / arguments.epochs)
    schedule = OneCycleLR(optimizer, arguments.learning_rate, steps, pct_start=rising, cycle_momentum=False)
    mixup = v2.MixUp(alpha=arguments.mixup, num_classes=num_classes)
    criterion = nn.CrossEntropyLoss(reduction="sum", label_smoothing=arguments.label_smoothing)
    for _ in tqdm(range(arguments.epochs), "training", leave=False):
        for latents, targets in loader:
            batch = mixup(latents.to(device), targets.to(device))
            for part, shares in zip(*(values.split(arguments.micro_batch) for values in batch), strict=True):
                loss = criterion(logits_of(model, part), shares) / len(targets)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            averaged.update_parameters(model)
    return averaged.eval()


def moving_average(decay: float, means: list[Tensor], weights: list[Tensor], step: Tensor) -> None:
    """The EMA of weights; the first steps are averaged faster, as by the trainer."""
    torch._foreach_lerp_(means, weights, max(1 - decay, 9 / (10 + int(step))))


def logits_of(network: nn.Module, latents: Tensor) -> Tensor:
    """fp32 logits (B, K); the layers compute in bf16 on a GPU."""
    with torch.autocast(latents.device.type, torch.bfloat16, enabled=latents.is_cuda):
        return network(latents.contiguous(memory_format=torch.channels_last)).float()


@torch.no_grad()
def predict(network: nn.Module, data: Latents, arguments: argparse.Namespace) -> np.ndarray:
    """Probabilities (N, K)."""
    batches = DataLoader(data, arguments.micro_batch)
    parts = [logits_of(network, latents.to(arguments.device)) for latents, _ in batches]
    return torch.cat(parts).double().softmax(1).cpu().numpy()


def by_regression(train: Latents, measured: Latents) -> np.ndarray:
    """Probabilities (N, K) of the measured images by scikit-learn's logistic regression."""
    step = -(-len(train) // LINEAR_IMAGES)
    few = replace(train, rows=train.rows[::step])
    model = LogisticRegression(C=LINEAR_STRENGTH, max_iter=300)
    model.fit(pooled(few), few.targets[few.rows])
    return model.predict_proba(pooled(measured))


def pooled(data: Latents) -> np.ndarray:
    """The latents, averaged to at most LINEAR_SIDE positions a side: (N, Z s s)."""
    side = min(LINEAR_SIDE, data[0][0].shape[-1])
    return np.stack([F.adaptive_avg_pool2d(data[i][0], side).flatten().numpy() for i in range(len(data))])


def weighted_ensemble(
    network: np.ndarray, linear: np.ndarray, targets: np.ndarray, folds: np.ndarray
) -> np.ndarray:
    """Mean of two heads' probabilities; in each fold, with the share that is best for the other folds."""
    mixed = np.empty_like(network)
    for fold in range(folds.max() + 1):
        others = folds != fold
        mixtures = {share: share * network + (1 - share) * linear for share in SHARES}
        best = min(SHARES, key=lambda share: loss_of(mixtures[share][others], targets[others]))
        mixed[~others] = mixtures[best][~others]
    return mixed


def loss_of(probabilities: np.ndarray, targets: np.ndarray) -> float:
    """The log loss, in nats; no class has to be among the targets."""
    return float(log_loss(targets, probabilities, labels=np.arange(probabilities.shape[1])))


def measure(
    files: Sequence[Path], targets: Sequence[np.ndarray], folds: np.ndarray, arguments: argparse.Namespace
) -> dict[str, np.ndarray]:
    """Probabilities (N, K) of each head; `files` and `targets`: of --data, then of --val if it is given."""
    num_classes = int(targets[0].max()) + 1
    everything = np.arange(len(targets[0]))
    if len(files) > 1:
        splits = [(everything, np.arange(len(targets[1])))]
    else:
        splits = [(everything[folds != fold], everything[folds == fold]) for fold in range(folds.max() + 1)]
    found = {head: np.zeros((len(targets[-1]), num_classes)) for head in ("network", "linear")}
    for train_rows, rows in splits:
        spread = train_rows[:: -(-len(train_rows) // STATISTICS_IMAGES)]
        stored = torch.from_numpy(np.load(files[0], mmap_mode="r")[spread, 0]).float()
        std, mean = torch.std_mean(stored, (0, 2, 3), keepdim=True)
        plain = Latents(files[0], targets[0], train_rows, mean[0], std[0].clamp(min=1e-6))
        measured = replace(plain, file=files[-1], targets=targets[-1], rows=rows)
        network = train_network(plain, num_classes, arguments)
        found["network"][rows] = predict(network, measured, arguments)
        found["linear"][rows] = by_regression(plain, measured)
    return found | {"ensemble": weighted_ensemble(*found.values(), targets[-1], folds)}


def write_results(
    output: Path, names: Sequence[str], classes: Sequence[str], targets: np.ndarray, found: dict
) -> None:
    """Print a table, and write results.json and a CSV file with the ensemble's probabilities for each VAE."""
    print(f"{len(targets)} images, {len(classes)} classes\nhead        top-1     F1  log loss  VAE")
    results: dict[str, dict[str, dict[str, float]]] = {path: {} for path in found}
    for number, (path, heads) in enumerate(found.items()):
        for head, probabilities in heads.items():
            top1 = float((probabilities.argmax(1) == targets).mean())
            f1 = float(f1_score(targets, probabilities.argmax(1), average="macro"))
            loss = loss_of(probabilities, targets)
            results[path][head] = {"top1": top1, "macro_f1": f1, "log_loss": loss}
            print(f"{head:10} {top1:6.1%} {f1:6.3f} {loss:9.3f}  {path}")
        rows = [[name, *row] for name, row in zip(names, heads["ensemble"].round(6).tolist(), strict=True)]
        with (output / f"probabilities_{number}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["image", *classes], *rows])
    (output / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")


def main() -> None:
    """Encode the images with each VAE, train and measure the heads, and write the results."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", category=ConvergenceWarning)  # of the logistic regression
    sets = [labelled_images(arguments.data, "--data")]
    if arguments.val:
        sets.append(labelled_images(arguments.val, "--val"))
    if sets[0].classes != sets[-1].classes:
        raise vae.UserError(f"--val {arguments.val} has other classes than --data {arguments.data}")
    targets = [np.array(images.targets) for images in sets]
    folds = np.zeros(len(targets[-1]), dtype=int)
    if not 2 <= arguments.folds <= np.bincount(targets[-1]).min():
        raise vae.UserError(f"--folds {arguments.folds}: give 2 to the number of images of every class")
    division = StratifiedKFold(arguments.folds, shuffle=True, random_state=arguments.seed)
    for number, (_, rows) in enumerate(division.split(folds, targets[-1])):
        folds[rows] = number
    names = [[name for name, _ in images.samples] for images in sets]
    found = {}
    for path in arguments.vae:
        model = vae.load_vae(path, device=arguments.device)
        arguments.device = next(model.autoencoder.parameters()).device.type
        files = [cached_latents(model, paths, arguments) for paths in names]
        del model
        found[path] = measure(files, targets, folds, arguments)
    write_results(arguments.output, names[-1], sets[0].classes, targets[-1], found)


if __name__ == "__main__":
    try:
        main()
    except vae.UserError as error:
        sys.exit(str(error))
