"""A step that runs out of memory is repeated with lower settings, and the weights do not change."""

import copy
from pathlib import Path

import pytest

from tests.harness.out_of_memory import run_out_of_memory
from tests.harness.training_runs import SHORT, assert_weights_close, records, train_short
from vae.config.options import RECOMPUTE
from vae.model.autoencoder import AutoencoderKL, set_recompute
from vae.system.errors import UserError
from vae.training.run import train


def out_of_memory_lines(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if "out of memory" in line]


def test_out_of_memory_in_a_later_pass_discards_the_gradients_of_the_first(tiny, tmp_path, monkeypatch):
    expected = train_short(tiny, tmp_path / "expected")
    sizes = run_out_of_memory(monkeypatch, lambda _, sizes: len(sizes) == 4)  # the second step's second pass
    found = train_short(tiny, tmp_path / "found", micro_batch_size="2")
    assert sizes == [2, 2, 2, 2] + [1] * 12
    assert_weights_close(found, expected)


def test_other_errors_of_the_device_are_not_retried(tiny, monkeypatch):
    sizes = run_out_of_memory(monkeypatch, lambda _, sizes: True, "CUDA error: an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        train({**tiny, **SHORT})
    assert sizes == [4]


def recompute_level(network: AutoencoderKL) -> str:
    """The recompute level whose settings the network has."""

    def settings(of: AutoencoderKL) -> list:
        names = ("recompute", "checkpointed", "start_checkpointed")
        return [getattr(module, name, None) for module in of.modules() for name in names]

    found, other = settings(network), copy.deepcopy(network)
    for level in RECOMPUTE:
        set_recompute(other, level)
        if settings(other) == found:
            return level
    raise AssertionError("no recompute level has these settings")


@pytest.mark.slow
def test_out_of_memory_with_a_single_image_raises_the_recompute_level(tiny, tmp_path, monkeypatch, capsys):
    expected = train_short(tiny, tmp_path / "expected")
    tried: list[tuple[int, str]] = []

    def fails(network: AutoencoderKL, sizes: list[int]) -> bool:
        tried.append((sizes[-1], recompute_level(network)))
        return tried[-1] != (1, "blocks")

    run_out_of_memory(monkeypatch, fails)
    capsys.readouterr()
    found = train_short(tiny, tmp_path / "found")
    assert tried[:5] == [(4, "none"), (2, "none"), *((1, level) for level in RECOMPUTE[:3])]
    assert set(tried[5:]) == {(1, "blocks")}
    assert_weights_close(found, expected)
    lines = out_of_memory_lines(capsys.readouterr().out)
    assert len(lines) == 5
    assert "--recompute blocks" in lines[-1]
    (memory,) = records(tmp_path / "found", "memory")
    assert (memory["recompute"], memory["micro_batch"]) == ("blocks", 1)


@pytest.mark.parametrize(
    ("options", "settings_and_remedy"),
    [
        ({}, "--recompute all: lower --image_size"),
        ({"recompute": "blocks"}, "--recompute blocks: use --recompute auto"),
    ],
)
def test_out_of_memory_without_lower_settings_is_a_one_line_error(
    tiny, monkeypatch, options, settings_and_remedy
):
    message = "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED\nwith more lines"
    run_out_of_memory(monkeypatch, lambda _network, _sizes: True, message)
    with pytest.raises(UserError, match=f"--micro_batch_size 1 {settings_and_remedy}") as caught:
        train({**tiny, **SHORT, **options})
    assert f"--output_dir {Path(tiny['output_dir'])} --resume_from latest" in str(caught.value)
    assert str(caught.value).endswith("(reported as: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED)")
    assert "\n" not in str(caught.value)
