"""Builds the library of the null GPU for the PyTorch of this environment, and the environment of a child."""

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("null_gpu.cpp")
CACHE = SOURCE.parent.parent.parent / "build" / "null_gpu"  # compiled Triton kernels stay here, too
LIBRARY = "libnull_gpu.so"
# One library under three names: the loader opens the same file only once, so there is one set of counters.
OTHER_NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")
FLAGS = (
    *("-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-deprecated-declarations"),
    # PyTorch and this library must not share a C++ runtime: each keeps the one that it was made for
    *("-static-libstdc++", "-static-libgcc", "-fvisibility=hidden", "-Wl,--exclude-libs,ALL"),
)


def why_not() -> str | None:
    """The reason why the null GPU cannot be built here, or None."""
    if not sys.platform.startswith("linux"):
        return "the null GPU needs Linux"
    if _compiler() is None:
        return "the null GPU needs a C++ compiler"
    if _package("torch") is None or not (_package("torch") / "lib" / "libtorch_cuda.so").exists():
        return "the null GPU needs a CUDA build of PyTorch"
    if not all(any((folder / header).exists() for folder in _headers()) for header in _REQUIRED_HEADERS):
        return "the null GPU needs the headers of CUDA and cuDNN, which the packages of PyTorch install"
    return None


def environment(
    gib: float | None = None, sm: int | None = None, workspaces_mib: str | None = None
) -> dict[str, str]:
    """The environment of a process that runs on the null GPU; builds the library if it is not up to date.

    gib             memory of the card (default: what PyTorch sees of the card)
    sm              120, an RTX 5090 (default); 90, an H100; 75, an RTX 2080 Ti without bf16
    workspaces_mib  workspaces of the plans that cuDNN offers for a convolution, the fastest first: "256,0"
    """
    folder = build()
    settings = {"NULL_GPU_GIB": gib, "NULL_GPU_SM": sm, "NULL_GPU_WORKSPACES_MIB": workspaces_mib}
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(filter(None, (str(folder / LIBRARY), os.environ.get("LD_PRELOAD")))),
        "LD_LIBRARY_PATH": ":".join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH")))),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(CACHE / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"),
        "CUDA_VISIBLE_DEVICES": "0",
        **{name: str(value) for name, value in settings.items() if value is not None},
    }


@functools.cache
def build() -> Path:
    """The folder with the library, built if it does not exist for this source and these headers."""
    includes = [f"-I{folder}" for folder in _headers()]
    key = hashlib.sha256("\n".join((SOURCE.read_text("utf-8"), *FLAGS, *includes)).encode()).hexdigest()[:12]
    folder = CACHE / key
    if (folder / LIBRARY).exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        made = Path(temporary, "library")
        made.mkdir()
        compiler = _compiler()
        assert compiler is not None
        subprocess.run(
            [compiler, *FLAGS, *includes, str(SOURCE), "-o", str(made / LIBRARY), "-ldl"], check=True
        )
        for name in OTHER_NAMES:
            (made / name).symlink_to(LIBRARY)
        if not folder.exists():  # another process may have been faster
            made.rename(folder)
    return folder


_REQUIRED_HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h", "cudnn_graph.h")


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


def _headers() -> list[Path]:
    """Folders with headers: of PyTorch's CUDA and cuDNN; then of Triton, which has the rest of CUDA's."""
    nvidia, triton = _package("nvidia"), _package("triton")
    folders = sorted(nvidia.glob("*/include")) if nvidia else []
    return folders + ([triton / "backends" / "nvidia" / "include"] if triton else [])


def _package(name: str) -> Path | None:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    folders = spec.submodule_search_locations if spec else None
    return Path(next(iter(folders))) if folders else None
