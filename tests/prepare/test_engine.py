"""--engine ray: the same files as from the process pool, also if a node or the command itself is killed.

Most tests need the package ray (`pip install ray`), which the test environment does not have.
"""

import os
import shutil
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from tests.harness.image_kinds import detailed, encoded
from tests.harness.runs import ROOT, run_script
from tests.harness.waiting import wait_until
from vae.config.prepare_flags import parse_prepare_flags
from vae.prepare import engine
from vae.prepare.pool import Limits
from vae.system.errors import UsageError, UserError

FLAGS = ["--mode", "shard", "--input_dir", "in", "--output_dir", "out"]
IMAGES = 60


def test_missing_package_is_one_line_with_its_installation(monkeypatch):
    monkeypatch.setattr("vae.config.prepare_flags.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--engine ray .*pip install ray"):
        parse_prepare_flags([*FLAGS, "--engine", "ray"])


def test_address_without_the_engine_is_an_error():
    with pytest.raises(UsageError, match=r"--ray_address .*--engine ray"):
        parse_prepare_flags([*FLAGS, "--ray_address", "10.0.0.1:6379"])


def test_address_without_a_cluster_is_an_error_at_once():
    with pytest.raises(UserError, match=r"--ray_address 127\.0\.0\.1:1: .*ray start --head"):
        engine._check_address("127.0.0.1:1")
    engine._check_address("auto")


def test_node_that_does_not_see_the_input_is_an_error_and_not_a_folder_of_bad_images(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.png").write_bytes(b"")
    probed = engine._probe_path(str(tmp_path / "raw"))
    assert probed == str(tmp_path / "raw" / "a.png")
    (tmp_path / "raw" / "a.png").unlink()  # as an empty mount point
    with pytest.raises(UserError, match=r"--engine ray: node .* does not see .*a\.png"):
        engine._NodeActor(lambda _: print, 1, os.getcwd(), [probed]).run("x")


def test_items_of_a_batch_are_run_in_processes_that_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make = partial(engine._item_worker, _absolute_and_process, Limits())
    actor = engine._NodeActor(make, 1, str(tmp_path), [str(tmp_path)])
    one, two = actor.run(["a", "b"]), actor.run(["c"])
    assert [(item, path) for item, (path, _) in [*one, *two]] == [(x, str(tmp_path / x)) for x in "abc"]
    assert len({process for _, (_, process) in [*one, *two]}) == 1
    assert os.getpid() not in {process for _, (_, process) in one}


def _absolute_and_process(name):
    return os.path.abspath(name), os.getpid()


@pytest.mark.parametrize(("num_workers", "cores"), [("auto", {"a": 8, "b": 2}), ("3", {"a": 3, "b": 2})])
def test_processes_of_each_node(num_workers, cores):
    nodes = [
        {"NodeID": name, "Alive": name != "dead", "Resources": {"CPU": count} if count else {}}
        for name, count in {"a": 8.0, "b": 2.0, "head": 0.0, "dead": 4.0}.items()
    ]
    cluster = object.__new__(engine.Cluster)
    cluster._ray, cluster._config = (
        SimpleNamespace(nodes=lambda: nodes),
        SimpleNamespace(num_workers=num_workers),
    )
    assert cluster.cores() == cores


def test_items_are_read_as_needed():
    items = iter(range(100))
    batches = engine._batches(items, 3)
    assert next(batches) == [0, 1, 2]
    assert next(items) == 3


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two nodes on this machine, besides its head."""
    utils = pytest.importorskip("ray.cluster_utils", reason="ray is not installed")
    cluster = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.workers = [cluster.add_node(num_cpus=1) for _ in range(2)]
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Images, a copy and a damaged file, and what the process pool makes of them in each mode."""
    root = tmp_path_factory.mktemp("engine")
    (root / "raw").mkdir()
    for number in range(IMAGES):
        data = encoded(detailed(seed=number, height=256, width=256), "PNG")
        (root / "raw" / f"{number:02}.png").write_bytes(data)
    (root / "raw" / "copy.png").write_bytes(data)
    (root / "raw" / "cut.png").write_bytes(data[:5000])
    return root


def command(root, output, *flags):
    return [
        *("prepare_data.py", "--input_dir", str(root / "raw"), "--output_dir", str(root / output)),
        *flags,
    ]


SHARD = ("--mode", "shard", "--shard_mb", "1")
PREPROCESS = ("--mode", "preprocess", "--target_size", "64", "128", "--format", "png")


def on(cluster):
    return ("--engine", "ray", "--ray_address", cluster.address)


def contents(folder):
    """All files below a folder but its ledger."""
    found = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {path: data for path, data in found.items() if "ledger" not in path.name}


def check_equal(root, output, *flags):
    """The output is that of the process pool."""
    expected = root / f"pool_{flags[1]}"
    if not expected.exists():
        done = run_script(*command(root, expected.name, *flags))
        assert done.returncode == 0, done.stderr
    assert contents(root / output) == contents(expected)


def test_preprocess_and_validate_on_a_cluster_give_the_same(cluster, source):
    done = run_script(*command(source, "converted", *PREPROCESS, *on(cluster)))
    assert done.returncode == 0, done.stderr
    assert "1 rejected" in done.stdout
    check_equal(source, "converted", *PREPROCESS)
    reports = []
    for flags in ((), on(cluster)):
        report = source / f"report{len(flags)}.json"
        words = ("--input_dir", str(source / "raw"), "--output_file", str(report), "--no-csv")
        done = run_script("prepare_data.py", "--mode", "validate", *words, *flags)
        assert done.returncode == 0, done.stderr
        lines = report.read_text().splitlines()
        reports.append([line for line in lines if "seconds" not in line and "per_minute" not in line])
    assert reports[0] == reports[1]


def test_killed_command_continues_on_the_cluster(cluster, source):
    words = command(source, "continued", *SHARD, *on(cluster))
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT)
    described = (source / "continued" / ".prepare").glob  # written after its shard
    wait_until(lambda: any(described("*.tar.json")), process)
    process.kill()
    process.wait()
    before = {path: path.stat().st_mtime_ns for path in described("*.tar.json")}
    done = run_script(*words)
    assert done.returncode == 0, done.stderr
    assert before
    assert before == {path: path.stat().st_mtime_ns for path in before}
    check_equal(source, "continued", *SHARD)


def test_killed_node_loses_nothing(cluster, source):
    words = command(source, "sharded", *SHARD, *on(cluster))
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT)
    wait_until(lambda: any((source / "sharded").glob("images-*.tar")), process)
    cluster.remove_node(cluster.workers.pop(), allow_graceful=False)
    assert process.wait(timeout=300) == 0
    check_equal(source, "sharded", *SHARD)
    verified = run_script(
        *("prepare_data.py", "--mode", "validate", "--input_dir", str(source / "sharded" / "dataset.json")),
        *("--output_file", str(source / "verified.json"), *on(cluster)),
    )
    assert verified.returncode == 0, verified.stderr
    shutil.rmtree(source / "sharded")
