"""How each library of conformance.py reads: `python -m benchmarks.conformance_readers LIBRARY JSON`.

A reader yields batches of (key, bytes) and can give its state after a batch. Keys are the first digits of the
SHA-256 of the bytes, so that every sample can be checked.
"""

import hashlib
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PACKAGES = {
    "litdata": "litdata",
    "webdataset": "webdataset",
    "energon": "megatron-energon",
    "datasets": "datasets",
}
SIZE = 64  # px
BATCH = 8  # images of all ranks
SHARD_BYTES = 60_000
Batches = Iterator[list[tuple[str, bool]]]
Saver = Callable[[], Any]


class SkippedError(Exception):
    """The library has no documented way to do this; the text is the result of the cell."""


def write_data(folder: str, images: int) -> None:
    """The image files, the shards, and the chunks of litdata, if it is installed."""
    from tests.harness.shards import pack

    root = Path(folder)
    (root / "raw").mkdir(parents=True)
    for number in range(images):
        noise = np.random.default_rng(number).integers(0, 256, (SIZE // 4, SIZE // 4, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        image.save(root / "raw" / f"{number:04}.jpg", quality=90)
    pack(root / "raw", root / "set", SHARD_BYTES)
    files = sorted((root / "raw").iterdir())
    (root / "victim.json").write_text(json.dumps(_visible_flip(files[images // 3].read_bytes())))
    try:
        import litdata
    except ImportError:
        return
    litdata.optimize(
        fn=_litdata_sample, inputs=[str(path) for path in files], output_dir=str(root / "litdata"),
        chunk_bytes=f"{SHARD_BYTES // 1000}KB", num_workers=1,
    )  # fmt: skip


def _litdata_sample(path: str) -> dict[str, Any]:
    data = Path(path).read_bytes()
    return {"key": hashlib.sha256(data).hexdigest()[:32], "image": data}


def _visible_flip(data: bytes) -> dict[str, Any]:
    """A bit of the image's data that changes its pixels, without an error of the decoder."""
    before = np.asarray(Image.open(io.BytesIO(data)))
    for at in range(len(data) // 2, len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        try:
            after = np.asarray(Image.open(io.BytesIO(bytes(changed))))
        except OSError:
            continue
        if data[at] != 0xFF and changed[at] != 0xFF and np.abs(before.astype(int) - after).max() > 8:
            return {"bytes": data.hex(), "at": at, "bit": 1}
    raise AssertionError("no bit changes the pixels")


def _checked(samples: list[tuple[str, bytes]]) -> list[tuple[str, bool]]:
    return [(key, hashlib.sha256(data).hexdigest().startswith(key)) for key, data in samples]


# ---- libraries -----------------------------------------------------------------------------------------


def read_ours(ask: dict[str, Any]) -> tuple[Batches, Saver]:
    """The trainer's loader; its state is the number of the next step."""
    from vae.data.dataset import CropDataset
    from vae.data.loading import TrainLoader
    from vae.data.remote_shards import open_images
    from vae.data.shard_cache import ShardCache
    from vae.data.shards import read_dataset

    if "url" in ask:
        cache = ShardCache(Path(ask["cache"]), ask.get("room", 2**30) / 2**30)
        images = open_images(read_dataset(f"{ask['url']}/dataset.json"), 4, cache)
    else:
        images = open_images(read_dataset(f"{ask['data']}/set/dataset.json"), 4, None)
    crops, world_size = CropDataset(images, image_size=SIZE, horizontal_flip=False), ask["world_size"]
    loader = TrainLoader(
        crops,
        local_batch=BATCH // world_size,
        rank=ask["rank"],
        world_size=world_size,
        num_workers=ask["workers"],
    )
    step = [json.loads(Path(ask["state"]).read_text()) if ask.get("resume") else 0]
    ask["named"] = 0

    def batches() -> Batches:
        for batch in loader.batches(0, step[0]):
            step[0] += 1
            ask["named"] += len(batch.rejected)
            right = []
            for index, image in zip(batch.indices.tolist(), batch.images, strict=True):
                key = images.key(index)
                pixels = np.asarray(Image.open(io.BytesIO(_original(ask, key)))) if "data" in ask else None
                same = (
                    pixels is None or np.abs(image.permute(1, 2, 0).numpy().astype(int) - pixels).max() <= 2
                )
                right.append((key, bool(same)))
            yield right
        loader.close()

    return batches(), lambda: step[0]


def _original(ask: dict[str, Any], key: str) -> bytes:
    """The image file with this key."""
    if "originals" not in ask:
        files = [path.read_bytes() for path in Path(ask["data"], "raw").iterdir()]
        ask["originals"] = {hashlib.sha256(data).hexdigest()[:32]: data for data in files}
    return ask["originals"][key]


def read_litdata(ask: dict[str, Any]) -> tuple[Batches, Saver]:
    """StreamingDataset and StreamingDataLoader with their state_dict."""
    import litdata

    _join(ask)
    options: dict[str, Any] = {"shuffle": True, "seed": 1, "drop_last": True}
    if "room" in ask:
        options |= {"max_cache_size": ask["room"], "cache_dir": ask["cache"]}
        source = f"local:{ask['data']}/litdata"
    elif "url" in ask:
        source = "s3://bucket/litdata"
        keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "endpoint_url": ask["url"]}
        options |= {"storage_options": keys, "cache_dir": ask["cache"]}
    else:
        source = f"{ask['data']}/litdata"
    dataset = litdata.StreamingDataset(source, **options)
    loader = litdata.StreamingDataLoader(
        dataset, batch_size=BATCH // ask["world_size"], num_workers=ask["workers"], collate_fn=list
    )
    if ask.get("resume"):
        loader.load_state_dict(json.loads(Path(ask["state"]).read_text()))
    return ([*_checked([(s["key"], s["image"]) for s in batch])] for batch in loader), loader.state_dict


def read_webdataset(ask: dict[str, Any]) -> tuple[Batches, Saver]:
    """The pipeline of its documentation. It has no state to resume from."""
    import webdataset

    if ask.get("resume") or "stop" in ask:
        raise SkippedError("none: no state (its issues 234 and 271)")
    names = _tars(ask)
    urls = [f"{ask['url']}/{name}" if "url" in ask else f"{ask['data']}/set/{name}" for name in names]
    cache = {"cache_dir": ask["cache"]} if "cache" in ask else {}
    if "room" in ask:
        cache["cache_size"] = ask["room"]
    dataset = webdataset.WebDataset(
        urls, shardshuffle=100, seed=1, nodesplitter=webdataset.split_by_node, **cache
    ).shuffle(100)
    samples = dataset.to_tuple("__key__", "jpg").batched(BATCH // ask["world_size"], collation_fn=list)
    loader = webdataset.WebLoader(samples, batch_size=None, num_workers=ask["workers"])
    return (_checked(batch) for batch in loader), lambda: None


def read_energon(ask: dict[str, Any]) -> tuple[Batches, Saver]:
    """get_train_dataset and its savable loader. It decodes, so pixels are compared."""
    source = _multi_storage(ask) if "url" in ask else f"{ask['data']}/set"
    from megatron import energon

    _join(ask)
    workers = energon.WorkerConfig(
        rank=ask["rank"], world_size=ask["world_size"], num_workers=ask["workers"], seed_offset=1
    )
    dataset = energon.get_train_dataset(
        source, batch_size=BATCH // ask["world_size"], worker_config=workers,
        shuffle_buffer_size=64, max_samples_per_sequence=32, repeat=False,
    )  # fmt: skip
    loader = energon.get_savable_loader(dataset)
    import torch

    if ask.get("resume"):
        states = [
            torch.load(f"{ask['state']}.{rank}", weights_only=False) for rank in range(ask["world_size"])
        ]
        loader.restore_state_rank(states[ask["rank"]])

    def batches() -> Batches:
        for batch in loader:
            found = []
            for key, image in zip(batch.__key__, batch.image, strict=True):
                key = key.rsplit("/")[-1]
                if "data" not in ask:
                    found.append((key, True))
                    continue
                pixels = np.asarray(Image.open(io.BytesIO(_original(ask, key)))).astype(int)
                found.append(
                    (key, bool(np.abs((image.numpy() * 255).round().transpose(1, 2, 0) - pixels).max() <= 2))
                )
            yield found

    def save() -> None:
        torch.save(loader.save_state_rank(), f"{ask['state']}.{ask['rank']}")

    return batches(), save


def _multi_storage(ask: dict[str, Any]) -> str:
    """The address of the data on an S3 store for multi-storage-client, which is configured for it."""
    keys = {"access_key": "a", "secret_key": "b"}
    store = {
        "storage_provider": {"type": "s3", "options": {"base_path": "shards", "endpoint_url": ask["url"]}},
        "credentials_provider": {"type": "S3Credentials", "options": keys},
        "caching_enabled": "room" in ask,
    }
    config: dict[str, Any] = {"profiles": {"store": store}}
    if "room" in ask:
        size = f"{ask['room'] // 10**6}M"
        config["cache"] = {"size": size, "cache_line_size": size, "location": ask["cache"]}
    path = Path(ask["out"]).with_name("multi_storage.json")
    path.write_text(json.dumps(config))
    os.environ |= {"MSC_CONFIG": str(path), "AWS_DEFAULT_REGION": "us-east-1"}
    return "msc://store"


def read_datasets(ask: dict[str, Any]) -> tuple[Batches, Saver]:
    """A streamed WebDataset with state_dict; in one process: several need torchdata's StatefulDataLoader."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    if "room" in ask:
        raise SkippedError("streams have no cache")
    if ask["workers"] > 1 and ("stop" in ask or ask.get("resume")):
        raise SkippedError("needs torchdata's StatefulDataLoader, and the same number of workers")
    base = ask.get("url") or f"{ask['data']}/set"
    files = [f"{base}/{name}" for name in _tars(ask)]
    stream = datasets.load_dataset("webdataset", data_files=files, split="train", streaming=True)
    stream = stream.cast_column("jpg", datasets.Image(decode=False)).shuffle(seed=1, buffer_size=64)
    if ask["world_size"] > 1:
        stream = split_dataset_by_node(stream, ask["rank"], ask["world_size"])
    if ask.get("resume"):
        stream.load_state_dict(json.loads(Path(ask["state"]).read_text()))

    def batches() -> Batches:
        held = []
        for sample in stream:
            held.append((sample["__key__"], sample["jpg"]["bytes"]))
            if len(held) == BATCH // ask["world_size"]:
                yield _checked(held)
                held = []
        if held:
            yield _checked(held)

    return batches(), stream.state_dict


READERS = {
    "ours": read_ours,
    "litdata": read_litdata,
    "webdataset": read_webdataset,
    "energon": read_energon,
    "datasets": read_datasets,
}


def _tars(ask: dict[str, Any]) -> list[str]:
    if "data" not in ask:
        return ["images-000000.tar"]
    return sorted(path.name for path in Path(ask["data"], "set").glob("*.tar"))


def _join(ask: dict[str, Any]) -> None:
    """Join the other rank, as torchrun would: these libraries ask PyTorch for rank and world size."""
    if ask["world_size"] == 1:
        return
    import torch.distributed as dist

    meeting = Path(ask["out"]).with_name(f"join_{os.getppid()}_{'resume' in ask}")
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=ask["rank"], world_size=ask["world_size"]
    )


def _watch(folder: str, most: list[int]) -> None:
    """Note the most bytes that the files of a folder have."""
    while True:
        sizes = []
        for path in Path(folder).rglob("*"):
            try:
                sizes.append(path.stat().st_size if path.is_file() and path.suffix != ".json" else 0)
            except OSError:
                continue
        most[0] = max(most[0], sum(sizes))
        time.sleep(0.01)


def main() -> None:
    """Read what is asked for, and write the result."""
    library, ask = sys.argv[1], json.loads(sys.argv[2])
    most = [0]
    if "cache" in ask:
        Path(ask["cache"]).mkdir(exist_ok=True)
        threading.Thread(target=_watch, args=(ask["cache"], most), daemon=True).start()
    result: dict[str, Any] = {}
    try:
        batches, save = READERS[library](ask)
        found = []
        for batch in batches:
            found.append(batch)
            if len(found) == ask.get("stop"):
                state = save()
                if ask["rank"] == 0 and state is not None:
                    Path(ask["state"]).write_text(json.dumps(state))
                break
        result |= {"batches": found, "cache_bytes": most[0]}
        if "named" in ask:
            result["named"] = ask["named"]
    except SkippedError as error:
        result["skipped"] = str(error)
    Path(ask["out"]).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # without waiting for worker processes


if __name__ == "__main__":
    main()
