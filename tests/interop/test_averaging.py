"""Averages: exact means, only from one start, and with scores of the same images."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.small_vae import SMALL, write_vae
from vae.config.options import Config, flatten
from vae.config.trained_vae_flags import parse_export_flags
from vae.interop.averaging import ENCODER, average, combine, hash_of_weights
from vae.interop.exporting import export
from vae.interop.vae_files import START_KEY, load_vae
from vae.interop.vae_path import WEIGHTS_NAME
from vae.interop.writing import write_safetensors
from vae.system.errors import UserError

ONE, OTHER = "1" * 64, "2" * 64


def config_of(*paths, options=""):
    return parse_export_flags(["--vae", *map(str, paths), "--output", "out", *options.split()])


def combined(*paths, options=""):
    return combine([load_vae(path) for path in paths], config_of(*paths, options=options))


@pytest.fixture(scope="module")
def folds(tmp_path_factory):
    """Three VAEs that claim to have one start."""
    folder = tmp_path_factory.mktemp("folds")
    return [write_vae(folder / f"fold_{seed}", seed, start=ONE) for seed in (0, 1, 2)]


def test_mean_is_accurate_to_fp32_rounding_and_exact_for_equal_tensors():
    generator = torch.Generator().manual_seed(0)
    parts = [{"w": 1000 + torch.randn(5000, generator=generator), "n": torch.tensor(7)} for _ in range(3)]
    weights = [0.5, 0.3, 0.2]
    found = average(parts, weights)
    expected = sum(weight * part["w"].double() for weight, part in zip(weights, parts, strict=True))
    # half the fp32 spacing below 1024; sums in fp32 would have a larger error
    assert (found["w"].double() - expected).abs().max() <= 2**-14 / 2 + 1e-9
    assert found["n"] == 7
    assert torch.equal(average([parts[0]] * 3, [1 / 3] * 3)["w"], parts[0]["w"])


def test_weights_of_scores_are_a_softmax_of_recorded_losses(tmp_path, capsys):
    """The loss of the step at which each checkpoint was saved; 1/e per --temperature above the lowest."""
    vaes = []
    for number, loss in enumerate((0.2, 0.202)):
        path = write_vae(tmp_path / str(number) / "vae", 0, replace(SMALL, channels=(16,)), start=ONE)
        records = [("validation", 4, 0.4), ("train", 8, 0.1), ("validation", 8, loss)]
        lines = [json.dumps({"kind": kind, "step": step, "loss": value}) for kind, step, value in records]
        (path.parent / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        vaes.append(load_vae(path))
        vaes[-1].file.step = 8
    config = config_of(*(tmp_path / str(number) / "vae" for number in (0, 1)), options="--average_by score")
    combine(vaes, config)
    weights = [float(line.split()[1].strip("%")) for line in capsys.readouterr().out.splitlines()[:2]]
    assert weights == pytest.approx([100 / (1 + math.exp(-1)), 100 / (1 + math.e)], abs=0.1)
    vaes[1].file.step = 12
    with pytest.raises(UserError, match=r"has no validation at step 12.*give --scores"):
        combine(vaes, config)
    vaes[1].file.step = None
    with pytest.raises(UserError, match=r"is not a checkpoint of a run.*--scores"):
        combine(vaes, config)


def test_hash_depends_on_values_and_names_and_not_on_layout():
    weights = {"a": torch.randn(2, 3, 4, 4), "b": torch.randn(3)}
    assert hash_of_weights({"b": weights["b"], "a": weights["a"].to(memory_format=torch.channels_last)}) == (
        hash_of_weights(weights)
    )
    assert hash_of_weights({"a": weights["a"], "c": weights["b"]}) != hash_of_weights(weights)
    assert hash_of_weights({**weights, "b": weights["b"] + 1e-6}) != hash_of_weights(weights)


@pytest.mark.parametrize("options", ["", "--dtype bf16"])
def test_exports_and_averages_keep_their_start(tmp_path, image_folder, capsys, options):
    written = write_vae(tmp_path / "written", 3, replace(SMALL, channels=(16,)), start=ONE)

    def exported(name, *paths):
        output = tmp_path / (f"{name}_out.safetensors" if options else f"{name}_out")
        export(parse_export_flags(["--vae", *map(str, paths), "--output", str(output), *options.split()]))
        return output

    def exported_with(start, name):
        source = shutil.copytree(written, tmp_path / name)
        weights = load_file(written / WEIGHTS_NAME)  # not of the copy: Windows does not replace a mapped file
        write_safetensors(source / WEIGHTS_NAME, weights, {START_KEY: start} if start else {})
        return exported(name, source)

    one, two = exported("one", written), exported("two", written)
    other, foreign = exported_with(OTHER, "other"), exported_with("", "foreign")
    capsys.readouterr()
    mean = exported("mean", one, two)
    assert "does not say" not in "".join(capsys.readouterr())
    assert load_vae(mean).file.start == ONE
    with pytest.raises(UserError, match="different weights"):
        exported("refused", mean, other)
    unsure = exported("unsure", one, foreign)
    assert "does not say" in "".join(capsys.readouterr())
    assert load_vae(unsure).file.start == ""
    options += f" --fold_scaling sd --data_path {image_folder} --image_size 32 --device cpu"
    assert load_vae(exported("folded", written)).file.start == ""  # its channels have scales of their own


@pytest.mark.parametrize("other", [{"version": "1"}, {"ssim_weight": 0.3}])
def test_losses_of_other_images_or_other_terms_are_refused(other, tmp_path):
    paths = []
    for number, changed in enumerate(({}, other)):
        folder = tmp_path / str(number)
        shape = replace(SMALL, channels=(16,))
        paths.append(write_vae(folder / "vae", number, shape, start=ONE, init="default"))
        provenance = {"validation": {"version": changed.get("version", "0")}}
        (folder / "config.json").write_text(
            json.dumps({**flatten(Config()), **changed, "provenance": provenance})
        )
    with pytest.raises(UserError, match=r"different images.*evaluate_vae\.py.*--scores"):
        combined(*paths, options="--average_by score")


def test_frozen_encoders_stay_bitwise_and_others_are_reported(folds, capsys):
    first, second = (load_vae(path) for path in folds[:2])
    state = second.autoencoder.state_dict()
    encoder = {
        name: value for name, value in first.autoencoder.state_dict().items() if name.startswith(ENCODER)
    }
    second.autoencoder.load_state_dict(state | encoder)
    mean = combine([first, second], config_of(*folds[:2])).autoencoder.state_dict()
    assert all(torch.equal(mean[name], value) for name, value in encoder.items())
    assert "the same as before" in capsys.readouterr().out
    combined(*folds[:2])
    assert "encode images again" in capsys.readouterr().out


def test_constants_of_differing_encoders_are_their_mean_or_measured(folds, image_folder, tmp_path, capsys):
    changed = Path(shutil.copytree(folds[1], tmp_path / "changed"))
    config = json.loads((changed / "config.json").read_text()) | {"scaling_factor": 0.7}
    (changed / "config.json").write_text(json.dumps(config))
    words = ["--vae", str(folds[0]), str(changed), "--output", str(tmp_path / "out"), "--device", "cpu"]
    export(parse_export_flags(words))
    before = load_vae(folds[0]).file.constants
    mean = load_vae(tmp_path / "out").file.constants
    assert mean.scaling == pytest.approx((before.scaling + 0.7) / 2)
    assert mean.mean == pytest.approx(before.mean)
    capsys.readouterr()
    more = ["--data_path", str(image_folder), "--image_size", "32", "--overwrite"]
    export(parse_export_flags([*words, *more]))
    assert "does not contain the scaling" not in "".join(capsys.readouterr())
    measured = load_vae(tmp_path / "out").file.constants
    assert measured.scaling not in (before.scaling, 0.7, mean.scaling)
    text = json.dumps({**config, "scaling_factor": None})
    (changed / "config.json").write_text(text)
    with pytest.raises(UserError, match="or --data_path to measure it"):
        export(parse_export_flags([*words, "--overwrite"]))
