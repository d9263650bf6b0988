#!/usr/bin/env python3
"""How fast --mode preprocess is against other ways to do the same, and what each keeps of fine detail.

Draws 12-megapixel JPEGs, then times every way in processes of its own, turn by turn, and prints ratios to
plain Pillow; a ratio bears a busy machine better than seconds do. The whole of each way is timed: read,
decode, resize to cover, JPEG quality 95 with full colour, write. Ours includes hashes, checks and manifest,
and the start of its processes, which the others are spared.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vae.prepare.demo.draw import draw_image  # noqa: E402

WIDTH, HEIGHT = 4000, 3000


def draw(folder: Path, count: int) -> None:
    """`count` images of 12 megapixels: one drawn image, moved and mirrored, since drawing takes long."""
    base = draw_image(WIDTH, 5, 0)[:HEIGHT]
    for index in range(count):
        pixels = np.roll(base, (index * 397, index * 611), axis=(0, 1))[:, :: -1 if index % 2 else 1]
        Image.fromarray(np.ascontiguousarray(pixels)).save(folder / f"{index:03d}.jpg", quality=95)


def cover(width: int, height: int, size: int) -> tuple[int, int]:
    """Sides of an image whose shorter side has become `size`."""
    scale = size / min(width, height)
    return round(width * scale), round(height * scale)


def by_pillow(size: int, target: Path, path: Path, draft: bool = False) -> None:
    """Plain Pillow: decode, Lanczos, save."""
    with Image.open(path) as image:
        new = cover(*image.size, size)
        if draft:
            image.draft("RGB", new)
        resized = image.convert("RGB").resize(new, Image.Resampling.LANCZOS)
    resized.save(target / path.name, quality=95, subsampling=0)


def by_opencv(size: int, target: Path, path: Path) -> None:
    """OpenCV with INTER_AREA."""
    import cv2

    cv2.setNumThreads(1)
    image = cv2.imread(str(path))
    new = cover(image.shape[1], image.shape[0], size)
    resized = cv2.resize(image, new, interpolation=cv2.INTER_AREA)
    options = [cv2.IMWRITE_JPEG_QUALITY, 95, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, 0x111111]
    cv2.imwrite(str(target / path.name), resized, options)


def by_img2dataset(size: int, target: Path, path: Path) -> None:
    """img2dataset's own resizer in its mode keep_ratio; where that is missing, what it does written out."""
    resizer = img2dataset_resizer(size)
    if resizer is not None:
        encoded = resizer(BytesIO(path.read_bytes()))[0]
    else:
        import cv2

        cv2.setNumThreads(1)
        image = cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), cv2.IMREAD_UNCHANGED)
        new = cover(image.shape[1], image.shape[0], size)
        resized = cv2.resize(image, new, interpolation=cv2.INTER_AREA)
        encoded = cv2.imencode(".jpg", resized, [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()
    (target / path.name).write_bytes(encoded)


@cache
def img2dataset_resizer(size: int):
    """The resizer out of its file alone, for the package as a whole needs many others; None without it."""
    package = importlib.util.find_spec("img2dataset")
    if package is None:
        return None
    import cv2

    cv2.setNumThreads(1)
    file = Path(package.submodule_search_locations[0]) / "resizer.py"
    spec = importlib.util.spec_from_file_location("img2dataset_resizer", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Resizer(size, "keep_ratio", True)


WAYS = {
    "pillow": by_pillow,
    "pillow_draft": partial(by_pillow, draft=True),
    "opencv_area": by_opencv,
    "img2dataset_resizer": by_img2dataset,
}


def ready(_index: int) -> None:
    """Load what the ways need, so that starting is not timed."""
    Image.init()
    if has_opencv():
        img2dataset_resizer(64)


def time_way(name: str, size: int, source: Path, processes: int) -> tuple[float, Path]:
    """Seconds of one way over all images, and where they lie."""
    target = Path(tempfile.mkdtemp(dir=source.parent))
    if name.startswith("ours"):
        sizes = [str(size)] if name == "ours" else ["512", "1024", "2048"]
        line = [
            sys.executable,
            str(ROOT / "prepare_data.py"),
            "--mode",
            "preprocess",
            "--target_size",
            *sizes,
        ]
        line += ["--input_dir", source, "--output_dir", target, "--num_workers", processes]
        began = time.perf_counter()
        subprocess.run(list(map(str, line)), check=True, capture_output=True)
        return time.perf_counter() - began, target
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(ready, range(4 * processes)))
        began = time.perf_counter()
        list(pool.map(partial(WAYS[name], size, target), sorted(source.glob("*.jpg"))))
        return time.perf_counter() - began, target


def fine_detail(path: Path) -> float:
    """Energy of the finest scale (one Haar level) of an image's brightness."""
    grey = np.asarray(Image.open(path).convert("L")).astype(float)
    grey = grey[: grey.shape[0] // 2 * 2, : grey.shape[1] // 2 * 2]
    a, b, c, d = grey[::2, ::2], grey[1::2, ::2], grey[::2, 1::2], grey[1::2, 1::2]
    return float(((a - b - c + d) ** 2 + (a - b + c - d) ** 2 + (a + b - c - d) ** 2).mean())


def measure(source: Path, processes: int, rounds: int) -> dict:
    """Ratios and fine detail of each way at each size, and of three sizes in one pass."""
    names = [name for name in WAYS if "pillow" in name or has_opencv()]
    result: dict = {"sizes": {}}
    seconds: dict = {}
    time_way("ours", 1024, source, processes)  # files come into the cache
    for turn in range(rounds):
        for size in (1024, 2048):
            for name in [*names, "ours", *(["ours_three_sizes"] if size == 2048 else [])]:
                taken, target = time_way(name, size, source, processes)
                seconds.setdefault((size, name), []).append(taken)
                detail = [fine_detail(path) for path in sorted(target.glob("*.jpg"))]
                if turn == 0 and detail:
                    result["sizes"].setdefault(size, {})[name] = {"detail": float(np.mean(detail))}
                subprocess.run([sys.executable, "-c", f"import shutil; shutil.rmtree({str(target)!r})"])
                print(f"{size} {name}: {taken:.2f} s", file=sys.stderr, flush=True)
    for size, ways in result["sizes"].items():
        plain = ways["pillow"]["detail"]
        for name, way in ways.items():
            pairs = zip(seconds[size, "pillow"], seconds[size, name], strict=True)
            way["speed_ratio"] = round(median(theirs / own for theirs, own in pairs), 2)
            way["fine_detail"] = round(way.pop("detail") / plain, 3)
            way["images_per_second"] = round(result_count(source) / median(seconds[size, name]), 2)
    three = zip(seconds[2048, "ours_three_sizes"], seconds[2048, "ours"], strict=True)
    result["three_sizes_over_largest"] = round(median(all_ / one for all_, one in three), 2)
    return result


def result_count(source: Path) -> int:
    """Number of source images."""
    return sum(1 for _ in source.glob("*.jpg"))


def has_opencv() -> bool:
    """Whether OpenCV can be measured here."""
    return importlib.util.find_spec("cv2") is not None


def main() -> None:
    """Measure and write a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=24, help="images")
    parser.add_argument("--rounds", type=int, default=3, help="turns; ratios are medians over them")
    parser.add_argument("--num_workers", type=int, default=2, help="processes of every way")
    parser.add_argument("--output_file", default="bench_prepare.json", help="where the result goes")
    parser.add_argument("--work_dir", help="where images are drawn and written; default: the system's")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work_dir) as work:
        source = Path(work) / "source"
        source.mkdir()
        draw(source, arguments.count)
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        result = measure(source, arguments.num_workers, arguments.rounds)
    result["load_before"] = load
    result["img2dataset"] = "its own resizer" if importlib.util.find_spec("img2dataset") else "written out"
    result["machine"] = {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    result["settings"] = {
        "count": arguments.count,
        "rounds": arguments.rounds,
        "workers": arguments.num_workers,
    }
    Path(arguments.output_file).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
