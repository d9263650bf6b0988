"""Where pip finds a build of PyTorch: in its own index, or in the general one if that cannot be reached."""

import http.client
import os
import re
import urllib.request

from launchers.torch_builds import title
from vae.checks.cuda_builds import BUILDS, triton_for_windows

WINDOWS = os.name == "nt"
PYTORCH_INDEX = "https://download.pytorch.org/whl"  # VAE_TORCH_INDEX sets a mirror
GENERAL_INDEX = "the general Python index"
TIMEOUT_SECONDS = 5

# The general index has one CUDA build per torch version on Linux: 12.8 for 2.10, 13.0 for 2.11 to 2.13, 13.2
# from 2.14 (PyTorch's release matrices, see vae/checks/cuda_builds.py). If it replaces the index of a CUDA
# build, only versions below these have that CUDA version.
GENERAL_INDEX_BELOW = {"cu126": "2.11", "cu128": "2.11", "cu130": "2.14"}


def torch_index() -> str:
    """PyTorch's index, or its mirror."""
    return os.environ.get("VAE_TORCH_INDEX", PYTORCH_INDEX).rstrip("/")


def read_index(build: str, timeout: float = TIMEOUT_SECONDS) -> str | None:
    """PyTorch's page of torch wheels for a build ("" for all); None if it cannot be downloaded."""
    address = "/".join(part for part in (torch_index(), build, "torch/") if part)
    try:
        with urllib.request.urlopen(address, timeout=timeout) as page:
            return page.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):  # no connection, timeout, TLS, 404, truncated page
        return None


def newest(versions: list[str]) -> str | None:
    """The highest of versions such as 2.10.0."""
    return max(versions, key=lambda version: [int(number) for number in version.split(".")], default=None)


def newest_torch(page: str, triton: bool = False) -> str | None:
    """The newest torch on a page of wheels, without its build: 2.11.0 for torch-2.11.0+cu128.

    `triton`: the newest that has a Triton for Windows, if there is one.
    """
    versions = re.findall(r"\btorch-(\d+(?:\.\d+)+)(?:%2B|\+|-)", page)
    with_triton = [version for version in versions if triton_for_windows(version)]
    return newest(with_triton if triton and with_triton else versions)


def newest_rocm(page: str) -> str | None:
    """The newest ROCm build of torch on PyTorch's page of all wheels, such as rocm7.1."""
    version = newest(re.findall(r"\btorch-[\d.]+(?:%2B|\+)rocm(\d+(?:\.\d+)+)-", page))
    return version and f"rocm{version}"


def torch_source(build: str) -> tuple[list[str], str, str | None]:
    """Arguments for pip that select the build, the name of the index, and a remark if it is a substitute.

    `build` may also be a version of torch, such as 2.10.0.

    Raises ValueError if the build is not available and no substitute exists.
    """
    base = torch_index()
    if build == "index":
        return [], GENERAL_INDEX, None
    if build[0].isdigit():  # a version; torchvision names the torch that it belongs to
        return [f"torch=={build}"], GENERAL_INDEX, None
    if build == "rocm":
        if WINDOWS:
            raise ValueError("--torch rocm: PyTorch's index has ROCm builds for Linux only")
        rocm = newest_rocm(read_index("") or "")
        if not rocm:
            raise ValueError(f"--torch rocm: {base} lists no ROCm build, or cannot be reached")
        build = rocm
    address = f"{base}/{build}"
    version = newest_torch(read_index(build) or "", triton=WINDOWS and build in BUILDS)
    if version:
        # The upper bound also prevents a newer build from the user's own pip settings (find-links).
        return ["--index-url", address, f"torch<={version}"], address, None
    below = GENERAL_INDEX_BELOW.get(build)
    remark = f"{address} cannot be reached: using {GENERAL_INDEX} instead{_difference(build)}."
    return [f"torch<{below}"] if below else [], GENERAL_INDEX, remark


def _difference(build: str) -> str:
    """The difference between the general index's build and the requested one."""
    if WINDOWS:
        return " (its builds for Windows are without CUDA)" if build in BUILDS else ""
    return f" (its build is for CUDA 12.8, not {title(build)})" if build == "cu126" else ""
