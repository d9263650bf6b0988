"""Judges Python, the packages and the build of PyTorch, from facts only."""

from vae.checks import remedies
from vae.checks.cuda_builds import triton_for_windows
from vae.checks.facts import Facts, Requirement
from vae.checks.results import FAIL, PASS, SKIP, WARN, Check
from vae.checks.versions import build, satisfies

MIN_PYTHON = (3, 10)
TORCH = ("torch", "torchvision")
# Everything works without these, only slower; without simplejpeg, damage inside JPEGs is not detected.
SPEED_ONLY = ("pyvips", "pyvips-binary", "simplejpeg")


def judge_software(facts: Facts) -> list[Check]:
    others = [_package(facts, r) for r in facts.requirements if r.name not in TORCH]
    return [
        _torch_installed(facts),
        _python(facts),
        _encoding(facts),
        *others,
        _torch_version(facts),
        _pair(facts),
        _build(facts),
        _triton(facts),
        _compiler(facts),
    ]


def _python(facts: Facts) -> Check:
    python = facts.python
    found = f"{'.'.join(map(str, python.version))}, {python.bits}-bit"
    found += ", in a virtual environment" if python.in_environment else ", the system's own"
    expected = "Python 3.10 or newer, 64-bit"
    fine = python.version >= MIN_PYTHON and python.bits == 64
    remedy = "" if fine else f"install Python 3.12, 64-bit, then {remedies.setup(facts)}"
    return Check("software.python", "Python", PASS if fine else FAIL, found, expected, remedy)


def _encoding(facts: Facts) -> Check:
    python = facts.python
    found = f"file names {python.file_name_encoding}, texts {python.text_encoding}"
    # We always pass an encoding when we read or write text; Python alone decides how file names are decoded.
    fine = python.file_name_encoding.lower().replace("-", "") == "utf8"
    remedy = "" if fine else remedies.set_variable(facts, "PYTHONUTF8", "1")
    return Check("software.encoding", "Encoding", PASS if fine else WARN, found, "utf-8 file names", remedy)


def _package(facts: Facts, wanted: Requirement) -> Check:
    check = f"software.{wanted.name.lower()}"
    expected = f"{wanted.name} {wanted.specifier}"
    trouble = WARN if wanted.name in SPEED_ONLY else FAIL
    if wanted.installed is None:
        note = " (only slower without it)" if wanted.name in SPEED_ONLY else ""
        return Check(check, wanted.name, trouble, f"not installed{note}", expected, remedies.setup(facts))
    if satisfies(wanted.installed, wanted.specifier):
        return Check(check, wanted.name, PASS, wanted.installed, expected)
    remedy = remedies.pip(facts, "install", f"{wanted.name}{wanted.specifier}")
    return Check(check, wanted.name, trouble, wanted.installed, expected, remedy)


def _torch_installed(facts: Facts) -> Check:
    check, title, expected = "torch.loads", "PyTorch loads", "import torch works"
    loaded = facts.loaded
    if loaded is None:
        found = "not installed in this Python"
        if facts.python.project_python:
            found += f"; to use the project's environment: {facts.python.project_python}"
            found += " check_compatibility.py"
        return Check(check, title, FAIL, found, expected, remedies.setup(facts))
    if loaded.error:
        return Check(check, title, FAIL, loaded.error, expected, remedies.same_pair(facts))
    if loaded.unfinished in ("starting Python", "loading torch"):
        found = f"{loaded.unfinished}: {loaded.ended}"
        return Check(check, title, FAIL, found, expected, remedies.same_pair(facts))
    return Check(check, title, PASS, facts.torch_files.version or "yes", expected)


def _torch_version(facts: Facts) -> Check:
    wanted = next(r.specifier for r in facts.requirements if r.name == "torch")
    version, expected = facts.torch_files.version, f"torch {wanted}"
    if version is None:
        return Check("torch.version", "PyTorch", SKIP, "not installed", expected)
    fine = satisfies(version, wanted)
    remedy = "" if fine else remedies.same_pair(facts)
    return Check("torch.version", "PyTorch", PASS if fine else FAIL, version, expected, remedy)


def _pair(facts: Facts) -> Check:
    """Whether torch and torchvision have the same build and compatible versions."""
    check, title = "torch.pair", "torch + torchvision"
    files, loaded = facts.torch_files, facts.loaded
    if files.version is None:
        return Check(check, title, SKIP, "PyTorch is not installed")
    wants = files.vision_wants_torch
    expected = "the same build" + (f"; this torchvision requires torch {wants}" if wants else "")
    problems = []
    if files.vision_version is not None and build(files.version) != build(files.vision_version):
        problems.append(": two different builds")
    elif files.vision_version is not None and wants and not satisfies(files.version, wants):
        problems.append(": built for another torch")
    if loaded and loaded.vision_error:
        problems.append(f" ({loaded.vision_error})")
    if loaded and loaded.unfinished == "loading torchvision":
        problems.append(f" ({loaded.ended})")
    found = f"torch {files.version}, torchvision {files.vision_version or 'not installed'}" + "".join(
        problems
    )
    if files.vision_version is not None and not problems:
        return Check(check, title, PASS, found, expected)
    return Check(check, title, FAIL, found, expected, remedies.same_pair(facts))


def _build(facts: Facts) -> Check:
    """Whether the build can use the installed card."""
    check, title, files = "torch.build", "Build of PyTorch", facts.torch_files
    if files.version is None:
        return Check(check, title, SKIP, "PyTorch is not installed")
    runtime = f"CUDA {files.cuda}" if files.cuda else f"ROCm {files.hip}" if files.hip else "no CUDA"
    found = f"{files.version} ({runtime})"
    if files.cuda or files.hip or not facts.smi.cards:
        return Check(check, title, PASS, found, "a CUDA build if there is an NVIDIA card")
    remedy = remedies.suitable_build(facts)
    return Check(check, title, FAIL, found, f"a CUDA build for the {facts.smi.cards[0].name}", remedy)


def _triton(facts: Facts) -> Check:
    """Whether Triton, which torch.compile uses on cards, has the version that torch expects."""
    check, title, files = "torch.triton", "Triton", facts.torch_files
    if files.version is None or not (files.cuda or files.hip):
        return Check(check, title, SKIP, "only builds for cards use it")
    wanted = files.triton_wanted
    if remedies.on_windows(facts):
        minor = triton_for_windows(files.version)
        wanted = f"=={minor}.*" if minor else None
        if minor is None:
            found = f"there is none for torch {files.version} on Windows: training runs without torch.compile"
            remedy = remedies.setup(facts, remedies.suggested(facts))
            return Check(check, title, WARN, found, "a torch between 2.10 and 2.14", remedy)
    if wanted is None:
        return Check(check, title, SKIP, f"torch {files.version} does not state which version it needs")
    expected = f"{files.triton_name} {wanted}"
    if files.triton_version and satisfies(files.triton_version, wanted):
        return Check(check, title, PASS, files.triton_version, expected)
    found = f"{files.triton_version or 'not installed'}: training runs without torch.compile, only slower"
    remedy = remedies.pip(facts, "install", f"{files.triton_name}{wanted}")
    return Check(check, title, WARN, found, expected, remedy)


def _compiler(facts: Facts) -> Check:
    check, title, expected = "torch.compiler", "C compiler", "gcc or clang, which torch.compile calls"
    if facts.torch_files.version is None:
        return Check(check, title, SKIP, "PyTorch is not installed")
    if facts.host.c_compiler:
        return Check(check, title, PASS, facts.host.c_compiler, expected)
    if remedies.on_windows(facts):  # TinyCC: github.com/triton-lang/triton-windows
        return Check(check, title, SKIP, "none on PATH; triton-windows includes its own")
    found = "none: training runs without torch.compile, only slower"
    return Check(check, title, WARN, found, expected, remedies.compiler(facts))
