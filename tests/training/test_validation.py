"""Validations of one image size are compared, the best one is named; slices by label."""

import math
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.harness.images import centre_crops
from tests.harness.preparing import write_manifest
from tests.harness.shards import pack
from tests.harness.training_runs import ONE_PROCESS, records, train_on_two_processes
from vae.data.image_files import FolderImages
from vae.images import pixels
from vae.images.folder import list_images
from vae.interop.vae_files import load_vae
from vae.ops.noise import keyed_normal
from vae.system.files import sha256_of_file
from vae.training.run import train
from vae.training.validation import MAX_SLICES, History, Slices, slice_record, slice_text


def metrics(loss: float, image_size: int = 32) -> dict[str, float]:
    return {"epoch": 1, "image_size": image_size, "loss": loss}


@pytest.mark.parametrize(
    ("values", "best", "without_gain"),
    [((0.4, 0.2, 0.3, 0.2), 0.2, 2), ((0.4, 0.5, 0.6, 0.3), 0.3, 0)],
    ids=["equal is no gain", "gain"],
)
def test_best_validation_has_the_lowest_loss(values, best, without_gain):
    history = History()
    for number, loss in enumerate(values, start=1):
        history.add_epoch(metrics(loss))
        history.add_checkpoint(f"checkpoint_epoch_{number}.pt", metrics(loss))
    assert (history.best, history.without_gain) == (metrics(best), without_gain)
    name = f"checkpoint_epoch_{values.index(best) + 1}.pt"
    assert (history.best_checkpoint, history.best_checkpoint_loss) == (name, best)


def test_another_image_size_replaces_the_best_validation_and_checkpoint():
    history = History()
    history.add_epoch(metrics(0.1, image_size=16))
    history.add_checkpoint("checkpoint_epoch_1.pt", metrics(0.1, image_size=16))
    history.add_epoch(metrics(0.3, image_size=32))
    history.add_checkpoint("checkpoint_epoch_2.pt", metrics(0.3, image_size=32))
    assert history.best == metrics(0.3, image_size=32)
    assert (history.best_checkpoint, history.best_checkpoint_loss) == ("checkpoint_epoch_2.pt", 0.3)


@pytest.mark.parametrize("unmeasured", [{"epoch": 1, "image_size": 32}, metrics(math.nan)])
def test_validation_without_a_loss_is_never_the_best(unmeasured):
    """All validation images were unusable, or the reconstructions were not finite."""
    history = History()
    for validation in (metrics(0.2), unmeasured, metrics(0.3)):
        history.add_epoch(validation)
        history.add_checkpoint("checkpoint_epoch_1.pt", validation)
    assert history.best == metrics(0.2)
    assert history.without_gain == 2
    assert history.best_checkpoint_loss == 0.2
    history = History()
    history.add_epoch(unmeasured)
    history.add_checkpoint("checkpoint_epoch_1.pt", unmeasured)
    assert history.best_checkpoint is None
    history.add_epoch(metrics(0.2))
    assert history.best == metrics(0.2)


def test_start_of_a_stage_is_a_candidate_for_best_and_counts_for_early_stopping():
    history = History()
    history.add_epoch(metrics(0.1, image_size=16))
    history.add_checkpoint("checkpoint_epoch_1.pt", metrics(0.1, image_size=16))
    history.add_start(metrics(0.25), "checkpoint_epoch_1.pt")
    for number, loss in enumerate((0.3, 0.26, 0.25), start=2):
        history.add_epoch(metrics(loss))
        history.add_checkpoint(f"checkpoint_epoch_{number}.pt", metrics(loss))
        assert (history.best, history.best_is_start) == (metrics(0.25), True)
        assert (history.best_checkpoint, history.best_checkpoint_loss) == ("checkpoint_epoch_1.pt", 0.25)
    assert history.without_gain == 3
    history.add_epoch(metrics(0.2))
    assert (history.best_is_start, history.without_gain) == (False, 0)


def test_rise_is_reported_once_with_its_remedy():
    history = History(start=metrics(0.25))
    assert history.rise_warning(metrics(0.25), "train longer", 0.1) is None
    assert history.rise_warning(metrics(0.252), "train longer", 0.1) is None  # too little to act on
    warning = history.rise_warning(metrics(0.3), "train longer", 0.1)
    for words in ("0.3000", "0.2500", "train longer"):
        assert words in warning
    assert history.rise_warning(metrics(0.4), "train longer", 0.1) is None
    assert History().rise_warning(metrics(0.4), "train longer", 0.1) is None  # no start was measured


# ---- real runs ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_with_rising_loss_warns_once(tiny, tmp_path, capsys):
    given = {
        **tiny,
        "init": "warm",
        "learning_rate": 0.01,
        "warmup_epochs": 0.0,
        "num_epochs": 3,
        "max_steps": 8,
    }
    assert train(given) == 0
    (warning,) = re.findall("WARNING: the validation loss .* is above .*", capsys.readouterr().out)
    found = records(tmp_path / "run", "validation")
    worse = next(record for record in found if record["loss"] > found[0]["loss"])
    assert len(found) == 4  # all but the first are worse
    assert f"loss {worse['loss']:.4f} is above the {found[0]['loss']:.4f}" in warning
    assert "--learning_rate (now 0.01)" in warning
    # The stage has warned already.
    assert train({**given, "resume_from": "latest", "max_steps": None}) == 0
    assert "WARNING: the validation loss" not in capsys.readouterr().out


def test_validations_record_noise_and_spread_of_the_latents_and_how_decoding_bears_noise(
    tiny, tmp_path, image_folder, other_images
):
    given = {**tiny, "data_path": str(other_images), "val_path": str(image_folder), "num_epochs": 1}
    assert train(given) == 0
    record = records(tmp_path / "run", "validation")[-1]
    model = load_vae(tmp_path / "run" / "checkpoint_epoch_1.pt").autoencoder
    images = torch.cat([crop / 127.5 - 1 for crop in centre_crops(image_folder)])
    with torch.no_grad():
        posterior = model.encode(images)
        std = posterior.mean.std((0, 2, 3), correction=0)
        ratios = (0.5 * posterior.logvar.mean((0, 2, 3))).exp() / std
        # of 4 channels the lower median
        assert record["sigma_over_std"] == pytest.approx(float(ratios.sort().values[1]), rel=1e-3)
        assert record["latent_std"] == pytest.approx(float(std.square().mean().sqrt()), rel=1e-3)
        chosen = FolderImages(image_folder, list_images(image_folder)).sample(4).tolist()
        noise = torch.stack([keyed_normal(posterior.mean.shape[1:], 0, index) for index in chosen])
        for tau in (0.1, 0.2, 0.4):
            latents = posterior.mean[chosen] + tau * noise * std[:, None, None]
            expected = pixels.psnr(model.decode(latents), images[chosen]).mean()
            assert record[f"psnr_noise_{tau:g}"] == pytest.approx(expected.item(), abs=1e-3)


# ---- Slices ----------------------------------------------------------------------------------------------


def test_mean_of_each_label():
    slices = Slices.of({0: "a", 1: "b", 2: None, 5: "a", 7: ""}, ONE_PROCESS)
    assert slices.labels == ["a", "b"]
    sums = slices.sums([0, 2, 5, 7], [20.0, 99.0, 30.0, 99.0])  # image 1 was unusable
    assert slice_record(sums)["slice_mean_psnr"] == 25.0


@pytest.mark.parametrize("labels", [[], ["one"] * 5, [str(n) for n in range(MAX_SLICES + 1)]])
def test_no_labels_one_label_and_names_of_images_are_no_slices(labels):
    slices = Slices.of(dict(enumerate(labels)), ONE_PROCESS)
    assert slices.sums(range(len(labels)), [1.0] * len(labels)) == {}


def test_worst_label_is_named():
    record = slice_record({"sky": (60.0, 2), "text\n": (20.0, 1)})
    assert record == {"slices": 2, "slice_mean_psnr": 25.0, "slice_worst_psnr": 20.0, "worst_slice": "text\n"}
    assert slice_text(record) == r" | worst of 2 labels: text\n, 20.00 dB"


@pytest.fixture
def manifest(image_folder, tmp_path) -> Path:
    """16 images, 4 of them for validation: 3 are `smooth` and the last one is `noise`."""
    rows = []
    for number, path in enumerate(sorted(image_folder.rglob("*.png"))):
        copy = tmp_path / "data" / path.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
        if number == 15:
            noise = torch.randint(0, 256, (40, 48, 3), dtype=torch.uint8)
            Image.fromarray(noise.numpy()).save(copy)
        row = {"path": copy.name, "sha256": sha256_of_file(copy), "split": "val" if number > 11 else "train"}
        rows.append({**row, "label": "noise" if number == 15 else "smooth"})
    file = tmp_path / "data" / "manifest.jsonl"
    write_manifest(file, rows)
    return file


def given_for(tiny, manifest) -> dict:
    given = {**tiny, "data_path": str(manifest), "num_epochs": 1, "batch_size": 2}
    del given["val_split"]
    return given


def test_a_run_records_the_worst_label(tiny, manifest, tmp_path, capsys):
    assert train({**given_for(tiny, manifest), "max_steps": 1}) == 0
    found = records(tmp_path / "run", "validation")
    for record in found:
        assert (record["slices"], record["worst_slice"]) == (2, "noise")
        smooth = 2 * record["slice_mean_psnr"] - record["slice_worst_psnr"]
        assert record["psnr"] == pytest.approx((3 * smooth + record["slice_worst_psnr"]) / 4)
    assert capsys.readouterr().out.count("worst of 2 labels: noise, ") == 2


@pytest.mark.slow
def test_two_processes_and_shards_have_the_same_slices(tiny, manifest, tmp_path):
    given = given_for(tiny, manifest)
    dataset = pack(manifest.parent, tmp_path / "set")
    train_on_two_processes({**given, "data_path": str(dataset), "batch_size": 1})
    assert train({**given, "output_dir": str(tmp_path / "one")}) == 0
    pair = [records(tmp_path / name, "validation")[0] for name in ("run", "one")]
    for name in ("slices", "worst_slice"):
        assert pair[0][name] == pair[1][name]
    for name in ("slice_mean_psnr", "slice_worst_psnr"):
        # Gradients are added in another order, and Adam's first steps enlarge that.
        assert pair[0][name] == pytest.approx(pair[1][name], abs=0.001)  # dB
