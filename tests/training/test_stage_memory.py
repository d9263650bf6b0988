"""The memory plan of a stage, its measured peaks, and steps that are repeated when memory runs out."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.harness.out_of_memory import run_out_of_memory
from tests.harness.training_runs import SHORT, assert_weights_close, records, train_short
from vae.config.options import RECOMPUTE
from vae.config.resolve import resolve
from vae.device import precision_support
from vae.memory.plan import StepMemory
from vae.memory.plan_table import Target, plan_profile
from vae.model.autoencoder import AutoencoderKL, set_recompute
from vae.system.errors import UserError
from vae.system.host import GIB
from vae.training import stage_memory
from vae.training.run import train
from vae.training.stage_memory import StagePlan, low_memory_warning, memory_limit


def test_each_stage_prints_its_plan_and_writes_a_record(tiny, tmp_path, capsys):
    stages = {"progressive": "16:1:4,32:1:2", "accumulation_steps": 2, "micro_batch_size": "3"}
    assert train({**tiny, **stages}) == 0
    printed = capsys.readouterr().out
    assert "plan    16 px, batch 8 as 3 x 3, recompute none: predicted peak" in printed
    assert "plan    32 px, batch 4 as 2 x 3, recompute none: predicted peak" in printed
    assert printed.count("memory  predicted peak") == 2
    small, large = records(tmp_path / "run", "memory")
    assert (small["image_size"], large["image_size"]) == (16, 32)
    assert (small["micro_batch"], small["recompute"]) == (3, "none")
    assert 0 < small["predicted_peak_gib"] < large["predicted_peak_gib"] < 0.1
    assert large["memory_peak_gib"] > 0.1  # the whole process, PyTorch included


def test_micro_batch_above_the_available_memory_prints_a_warning(tiny, capsys, monkeypatch):
    monkeypatch.setattr(stage_memory, "available_bytes", lambda device: 1000)
    assert train({**tiny, "num_epochs": 1, "micro_batch_size": "2"}) == 0
    printed = capsys.readouterr().out.splitlines()
    (line,) = [line for line in printed if line.startswith("WARNING: --micro_batch_size 2 ")]
    assert "--micro_batch_size auto" in line


def test_plan_of_the_run_equals_the_plan_table(tiny, tmp_path):
    given = {**tiny, "num_epochs": 1, "use_bf16": True}
    assert train(given) == 0
    (record,) = records(tmp_path / "run", "memory")
    here = Target(
        "CPU",
        None,
        is_gpu=False,
        precision=precision_support(torch.device("cpu")),
        available=8 * GIB,
        explained="",
    )
    plan = plan_profile("mine", resolve(given), here)
    assert record["predicted_peak_gib"] == plan.peak_gib
    assert (record["micro_batch"], record["recompute"]) == (plan.micro_batch, plan.recompute)


def test_the_prediction_is_what_pytorch_reserves_within_what_may_be_used():
    memory = StepMemory("none", 1, resident=5, working=14, reserve=1, flops=0, reserved=25)
    predictions = [StagePlan(memory, available).predicted for available in (30, 22, 19)]
    assert predictions == [25, 22, 20]  # the last does not fit
    on_cpu = StepMemory("none", 1, resident=5, working=14, reserve=1, flops=0)
    assert StagePlan(on_cpu, 30).predicted == 20


@pytest.mark.parametrize(("predicted", "limit"), [(20, 30), (40, 40)])
def test_a_run_may_reserve_what_is_available_or_what_its_own_settings_need(predicted, limit):
    memory = StepMemory("none", 1, resident=5, working=predicted - 6, reserve=1, flops=0)
    small = StepMemory("none", 1, resident=5, working=1, reserve=1, flops=0)
    assert memory_limit([StagePlan(small, 30), StagePlan(memory, 30)]) == limit


@pytest.mark.parametrize(
    ("platform", "free", "words"),
    [
        ("linux", 4 * GIB, None),
        (
            "linux",
            2 * GIB,
            "2.0 GiB of GPU memory are free, less than the plan of 10.0 GiB needs: a step may",
        ),
        ("win32", 2 * GIB, "the driver uses main memory instead"),
    ],
)
def test_other_programs_that_take_the_memory_of_the_plan(monkeypatch, platform, free, words):
    """6 GiB are reserved already."""
    monkeypatch.setattr(stage_memory, "sys", SimpleNamespace(platform=platform))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 32 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 6 * GIB)
    warning = low_memory_warning(torch.device("cuda"), 10 * GIB)
    assert words in warning if words else warning is None
    assert low_memory_warning(torch.device("cpu"), 10 * GIB) is None


# ---- Memory that runs out --------------------------------------------------------------------------------


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
