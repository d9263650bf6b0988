"""Datasets of shards with drawn pictures of known classes."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from vae.prepare.shard.write import Member, Plan, write_shard
from vae.shards.dataset_json import dataset_content
from vae.system.files import write_json

CLASSES = ("circle", "cross", "square", "stripes")


def drawn(kind: str, seed: int) -> Image.Image:
    """One of CLASSES in random colours, at a random place, before noise."""
    side, random = 32, np.random.default_rng(seed)
    noise = random.integers(0, 80, (side, side, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    draw = ImageDraw.Draw(image)
    colour = tuple(random.integers(120, 256, 3).tolist())
    size = int(random.integers(side // 2, side - 4))
    left, top = random.integers(0, side - size, 2).tolist()
    box, middle = (left, top, left + size, top + size), size // 2
    if kind == "circle":
        draw.ellipse(box, fill=colour)
    elif kind == "square":
        draw.rectangle(box, fill=colour)
    elif kind == "cross":
        draw.line((left + middle, top, left + middle, top + size), fill=colour, width=side // 8)
        draw.line((left, top + middle, left + size, top + middle), fill=colour, width=side // 8)
    else:
        for row in range(top, top + size, side // 8):
            draw.line((left, row, left + size, row), fill=colour, width=side // 16)
    return image


def write_labelled(folder: Path, count: int, first: int = 0, labels: Callable[[str], object] = str) -> Path:
    """The dataset.json of `count` drawn pictures in two shards; `labels`: label of a class, None for none."""
    members = []
    (folder / ".prepare").mkdir(parents=True)
    for number in range(count):
        kind = CLASSES[number % len(CLASSES)]
        path = folder / f"{first + number}.png"
        drawn(kind, first + number).save(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        content = {"source": f"{kind}/{path.name}", "label": labels(kind)}
        content = {name: value for name, value in content.items() if value is not None}
        size = path.stat().st_size
        members.append(Member(str(path), digest, "png", size, (32, 32), "0" * 32, json.dumps(content)))
    halves = members[: count // 2], members[count // 2 :]
    plans = [Plan(f"images-{number:06}.tar", half) for number, half in enumerate(halves)]
    shards = [write_shard(folder, plan) for plan in plans]
    write_json(folder / "dataset.json", dataset_content(shards, {}, None))
    return folder / "dataset.json"
