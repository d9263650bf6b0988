#!/usr/bin/env python3
"""Compare --mode preprocess with other methods: speed, and the fine detail that the images keep.

The benchmark draws 12-megapixel JPEGs. Then it times the methods in turn, each in new processes, and prints
ratios to plain Pillow: on a busy machine, ratios vary less than seconds. The time of a method includes
everything: read, decode, resize to cover, encode as JPEG of quality 95 without chroma subsampling, write. For
our method it also includes hashes, checks, the manifest and the start of its processes; the other methods get
processes that have already started.
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
from collections.abc import Callable
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
    """Write `count` images of 12 megapixels: one drawing, shifted and mirrored, because drawing is slow."""
    base = draw_image(WIDTH, 5, 0)[:HEIGHT]
    for index in range(count):
        pixels = np.roll(base, (index * 397, index * 611), axis=(0, 1))[:, :: -1 if index % 2 else 1]
        Image.fromarray(np.ascontiguousarray(pixels)).save(folder / f"{index:03d}.jpg", quality=95)


def cover(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height of an image after scaling its shorter side to `size`."""
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
    """The resizer of img2dataset in mode keep_ratio; the same operations if img2dataset is not installed."""
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
def img2dataset_resizer(size: int) -> Callable | None:
    """The resizer, or None without img2dataset. Importing only its file avoids the package's requirements."""
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


METHODS = {
    "pillow": by_pillow,
    "pillow_draft": partial(by_pillow, draft=True),
    "opencv_area": by_opencv,
    "img2dataset_resizer": by_img2dataset,
}


def warm_up(_index: int) -> None:
    """Load the libraries of all methods, so that the start of a process is not timed."""
    Image.init()
    if has_opencv():
        img2dataset_resizer(64)


def time_method(name: str, size: int, source: Path, processes: int) -> tuple[float, Path]:
    """Seconds of one method for all images, and the folder of the results."""
    target = Path(tempfile.mkdtemp(dir=source.parent))
    if name.startswith("ours"):
        sizes = [str(size)] if name == "ours" else ["512", "1024", "2048"]
        command = [sys.executable, ROOT / "prepare_data.py", "--mode", "preprocess", "--target_size", *sizes]
        command += ["--input_dir", source, "--output_dir", target, "--num_workers", processes]
        start = time.perf_counter()
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
        return time.perf_counter() - start, target
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(warm_up, range(4 * processes)))
        start = time.perf_counter()
        list(pool.map(partial(METHODS[name], size, target), sorted(source.glob("*.jpg"))))
        return time.perf_counter() - start, target


def fine_detail(path: Path) -> float:
    """Energy of the finest scale (one Haar level) of the luminance of an image."""
    gray = np.asarray(Image.open(path).convert("L")).astype(float)
    gray = gray[: gray.shape[0] // 2 * 2, : gray.shape[1] // 2 * 2]
    a, b, c, d = gray[::2, ::2], gray[1::2, ::2], gray[::2, 1::2], gray[1::2, 1::2]
    return float(((a - b - c + d) ** 2 + (a - b + c - d) ** 2 + (a + b - c - d) ** 2).mean())


def measure(source: Path, processes: int, rounds: int) -> dict:
    """Ratios and fine detail of each method at each size, and of three sizes in one pass."""
    names = [name for name in METHODS if "pillow" in name or has_opencv()]
    result: dict = {"sizes": {}}
    seconds: dict = {}
    time_method("ours", 1024, source, processes)  # to fill the file cache
    for round_ in range(rounds):
        for size in (1024, 2048):
            for name in [*names, "ours", *(["ours_three_sizes"] if size == 2048 else [])]:
                taken, target = time_method(name, size, source, processes)
                seconds.setdefault((size, name), []).append(taken)
                detail = [fine_detail(path) for path in sorted(target.glob("*.jpg"))]
                if round_ == 0 and detail:
                    result["sizes"].setdefault(size, {})[name] = {"detail": float(np.mean(detail))}
                subprocess.run([sys.executable, "-c", f"import shutil; shutil.rmtree({str(target)!r})"])
                print(f"{size} {name}: {taken:.2f} s", file=sys.stderr, flush=True)
    for size, methods in result["sizes"].items():
        plain = methods["pillow"]["detail"]
        for name, row in methods.items():
            pairs = zip(seconds[size, "pillow"], seconds[size, name], strict=True)
            row["speed_ratio"] = round(median(pillow / method for pillow, method in pairs), 2)
            row["fine_detail"] = round(row.pop("detail") / plain, 3)
            row["images_per_second"] = round(count_images(source) / median(seconds[size, name]), 2)
    three = zip(seconds[2048, "ours_three_sizes"], seconds[2048, "ours"], strict=True)
    result["three_sizes_over_largest"] = round(median(all_sizes / largest for all_sizes, largest in three), 2)
    return result


def count_images(source: Path) -> int:
    """Number of source images."""
    return sum(1 for _ in source.glob("*.jpg"))


def has_opencv() -> bool:
    """Whether OpenCV is installed."""
    return importlib.util.find_spec("cv2") is not None


def main() -> None:
    """Measure, print the result and write it to a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=24, help="number of images")
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of rounds; ratios are medians over them"
    )
    parser.add_argument("--num_workers", type=int, default=2, help="number of processes of each method")
    parser.add_argument("--output_file", default="bench_prepare.json", help="file for the result")
    parser.add_argument("--work_dir", help="folder for images; default: the temporary folder of the system")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work_dir) as work:
        source = Path(work) / "source"
        source.mkdir()
        draw(source, arguments.count)
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        result = measure(source, arguments.num_workers, arguments.rounds)
    result["load_before"] = load
    result["img2dataset"] = (
        "its own resizer" if importlib.util.find_spec("img2dataset") else "the same operations"
    )
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
