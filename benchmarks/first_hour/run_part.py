"""The process of one part: its remaining cases, one after another, each recorded as soon as it ends.

Whatever the device computes, a case is failed if it raises an exception, or if a broken kernel was replaced:
then it has not measured what it should.
"""

import gc
import os
import time
import traceback
from typing import Any

import torch

from benchmarks.comparison.report import describe_machine
from benchmarks.first_hour.case import DEVICE, NO_ARITHMETIC, Case, Settings, computes
from benchmarks.first_hour.parts import PARTS
from benchmarks.first_hour.record import DONE, EXIT_CARD_LOST, FAILED, NOT_REACHED, Record
from vae.checks import nvidia_smi
from vae.device import precision_support
from vae.ops.kernel_check import DTYPE_NAMES, choose_kernels
from vae.ops.library import REPLACED


def run_part(number: int, settings: Settings) -> int:
    """Run the cases that the record does not have; returns the exit code."""
    part, parent = PARTS[number], os.getppid()
    record = Record.open(settings.out, number, part.TITLE, machine(settings.quick))
    use_the_kernels_of_the_trainer()
    for case in part.cases(settings):
        if case.name in record.cases:
            continue
        if os.getppid() != parent:  # the program that started this process was killed
            return 1
        if case.seconds > settings.seconds_left:
            record.end(case.name, NOT_REACHED, needs_seconds=case.seconds)
            continue
        _run_case(case, settings, record)
        if not _card_is_usable():
            return EXIT_CARD_LOST
    return 0


def use_the_kernels_of_the_trainer() -> None:
    """Replace broken kernels, as every command does; the cases that ran without them are failed."""
    choose_kernels("auto", DEVICE, [getattr(torch, precision_support(DEVICE).fast_dtype)])


def _run_case(case: Case, settings: Settings, record: Record) -> None:
    record.begin(case.name)
    started = time.monotonic()
    try:
        result: dict[str, Any] = case.run(settings)
    except Exception as error:  # a case that fails is a result of the first hour
        text = f"{type(error).__name__}: {error}".strip()[:1000]
        record.end(case.name, FAILED, time.monotonic() - started, error=text)
        traceback.print_exc()
    else:
        replaced = sorted(f"{key.operation} ({DTYPE_NAMES[key.dtype]})" for key in REPLACED)
        text = f"PyTorch operations replaced the broken kernels of {', '.join(replaced)}"
        facts = {"status": FAILED, "error": text} if replaced else {"status": DONE}
        record.end(case.name, seconds=time.monotonic() - started, result=result, **facts)
    gc.collect()
    torch.cuda.empty_cache()


def _card_is_usable() -> bool:
    try:
        torch.ones(1, device=DEVICE).sum().item()
    except RuntimeError:
        return False
    return True


def machine(quick: bool) -> dict[str, Any]:
    """Card, driver, versions, date and commit, for the file of each part."""
    smi = nvidia_smi.query(timeout_seconds=15)
    arithmetic = "yes" if computes() else NO_ARITHMETIC
    facts = describe_machine(DEVICE)
    return {**facts, "driver": smi.driver or smi.status, "arithmetic": arithmetic, "quick": quick}
