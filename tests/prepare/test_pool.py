"""A process that dies, hangs or uses too much memory costs one item only."""

import multiprocessing.synchronize
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from tests.harness.waiting import is_running, wait_until
from vae.prepare.pool import Failure, Limits, run_tasks, time_limit
from vae.system.errors import UserError

LIMITS = Limits(seconds=5.0, memory_gib=0.5)


def work(item):
    kind, value = item
    if kind == "die":
        os.kill(os.getpid(), value)
    if kind == "exit":
        time.sleep(0.3)  # pebble has not noticed yet that the item has begun
        os._exit(value)
    if kind == "sleep":
        time.sleep(value)
    if kind == "loop":
        with time_limit(0.5):
            time.sleep(value)
    if kind == "eat":
        try:
            return len(bytearray(value))
        except MemoryError:
            return Failure("out_of_memory", "as a check of an image says it")
    if kind == "raise":
        raise OSError(28, "No space left on device")
    return value * 2


def outcomes(items, num_workers=2):
    return dict(run_tasks(work, items, num_workers, LIMITS))


def test_every_item_is_returned_once():
    items = [("double", number) for number in range(300)]
    assert outcomes(items) == {item: item[1] * 2 for item in items}
    assert outcomes([]) == {}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither these signals nor a memory limit")
def test_dead_hung_and_oversized_items_cost_one_item_each():
    trouble = {
        ("die", signal.SIGSEGV): "crashed",
        ("die", signal.SIGKILL): "out_of_memory",
        ("eat", 2**30): "out_of_memory",
        ("sleep", 600): "hung",
        ("loop", 601): "hung",
    }
    good = [("double", number) for number in range(50)]
    items = good[:10]
    for index, item in enumerate(trouble):
        items += [item, *good[10 + 5 * index : 15 + 5 * index]]
    found = outcomes(items + good[35:])
    assert {item: found[item] for item in good} == {item: item[1] * 2 for item in good}
    assert {item: found[item].reason for item in trouble} == trouble
    assert all(isinstance(found[item], Failure) and found[item].detail for item in trouble)


def test_endless_items_are_read_as_needed():
    taken = []

    def items():
        for number in count():
            taken.append(number)
            yield "double", number

    with closing(run_tasks(work, items(), 1, Limits())) as results:
        first = [next(results)[1] for _ in range(20)]
    assert len(set(first)) == 20
    assert set(first) <= {2 * number for number in taken}
    assert len(taken) < 30


def test_exceptions_of_the_function_are_raised():
    with pytest.raises(OSError, match="No space left"):
        outcomes([("double", 1), ("raise", 0), ("double", 2)])


@pytest.mark.parametrize(("code", "line"), [(3, "code 3"), (24, "ulimit -n")])
def test_a_process_that_ends_without_a_crash_blames_no_image(code, line):
    with pytest.raises(UserError, match=line):
        outcomes([("double", 1), ("exit", code)])


@pytest.mark.skipif(sys.platform == "win32", reason="locks are not in shared memory")
def test_processes_that_cannot_start_blame_no_image(monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(multiprocessing.synchronize._multiprocessing, "SemLock", refuse)
    with pytest.raises(UserError, match="/dev/shm"):
        outcomes([("double", 1)])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_end_if_their_parent_is_killed():
    code = (
        "from tests.prepare.test_pool import *\n"
        "items = [('double', 1)] + [('sleep', 0.9)] * 99\n"
        "for _ in run_tasks(work, items, 2, LIMITS):\n"
        "    print(os.getpid(), flush=True)\n"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True)
    parent.stdout.readline()
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    assert len(children) >= 2
    parent.kill()
    parent.communicate()
    wait_until(lambda: not any(map(is_running, children)))


class SlowToStart:
    """A function that only one process receives at once; the others need 2 s to start."""

    def __init__(self, first):
        self.first = first

    def __setstate__(self, state):
        self.__dict__ = state
        try:
            with open(self.first, "x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            time.sleep(2.0 * (self.first.read_text() != str(os.getpid())))

    def __call__(self, item):
        return item


def test_processes_that_are_still_starting_at_the_end_say_nothing(tmp_path, capfd):
    assert list(run_tasks(SlowToStart(tmp_path / "first"), [1], 3, Limits())) == [(1, 1)]
    time.sleep(2.5)
    assert capfd.readouterr().err == ""
