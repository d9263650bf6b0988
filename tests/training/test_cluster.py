"""Several nodes: two groups of torchrun on one machine, as docs/cluster.md starts them."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.harness.faults import child_processes
from tests.harness.runs import ROOT
from tests.harness.sharded_runs import VARIABLE, samples_in_order, samples_of_steps
from tests.harness.shards import write_shards
from tests.harness.waiting import wait_until
from vae.config.flags import command_words

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


def start_node(given: dict, port: int, is_first: bool, samples: Path, log: Path) -> subprocess.Popen:
    """One of two nodes with a process each."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    words += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_id", "first"]
    # Both have one address here. A node that is lost is noticed after 6 s instead of 15.
    words += ["--rdzv_conf", f"is_host={int(is_first)},keep_alive_interval=2", "--max_restarts", "3"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", VARIABLE: str(samples)}
    with log.open("a") as output:
        return subprocess.Popen(
            [*words, "-m", "tests.harness.faulty_train", *command_words(given)],
            env=environ,
            cwd=ROOT,
            stdout=output,
            stderr=output,
        )


def kill_node(process: subprocess.Popen) -> None:
    """Kill torchrun and its processes at once."""
    for pid in (process.pid, *child_processes(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def test_lost_node_that_comes_back_continues_with_the_same_samples(tiny, tmp_path):
    dataset, run = write_shards(tmp_path, count=75, shard_bytes=30_000), tmp_path / "run"
    given = {**tiny, "data_path": str(dataset), "num_epochs": 5, "checkpoint_steps": 3, "hang_minutes": 1}
    given |= {"resume_from": "latest", "batch_size": 4}
    del given["val_split"]
    samples, log = tmp_path / "samples.jsonl", tmp_path / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [start_node(given, port, is_first, samples, log) for is_first in (True, False)]
    try:
        wait_until(lambda: list(run.glob("checkpoint_step_*.pt")))
        kill_node(nodes[1])
        nodes[1] = start_node(given, port, False, samples, log)
        codes = [node.wait(timeout=180) for node in nodes]
    finally:
        for node in nodes:
            kill_node(node)
    assert codes == [0, 0], log.read_text()[-3000:]
    assert "another of the 2 processes of this run has ended" in log.read_text()
    assert samples_of_steps(samples, dataset) == samples_in_order(dataset, steps=45, batch=8)
