"""Judges Python, the packages and the build of PyTorch, from facts only."""

from vae.checks import remedies
from vae.checks.cuda_builds import triton_for_windows
from vae.checks.facts import Facts, Requirement
from vae.checks.results import FAIL, PASS, SKIP, WARN, Check, check
from vae.checks.versions import build, satisfies

MIN_PYTHON = (3, 10)
TORCH = ("torch", "torchvision")
# Everything works without these, only slower; without simplejpeg, damage inside JPEGs is not detected.
SPEED_ONLY = ("pyvips", "pyvips-binary", "simplejpeg")
NO_TORCH = "PyTorch is not installed"


def judge_software(facts: Facts) -> list[Check]:
    others = [_package(facts, r) for r in facts.requirements if r.name not in TORCH]
    return [_loads(facts), *_python(facts), *others, _version(facts), _pair(facts), *_build(facts)]


def _python(facts: Facts) -> list[Check]:
    python = facts.python
    found = f"{'.'.join(map(str, python.version))}, {python.bits}-bit, "
    found += "in a virtual environment" if python.in_environment else "the system's own"
    names = f"file names {python.file_name_encoding}, texts {python.text_encoding}"
    install = f"install Python 3.12, 64-bit, then {remedies.setup(facts)}"
    fine = python.version >= MIN_PYTHON and python.bits == 64
    # We always pass an encoding when we read or write text; Python alone decides how file names are decoded.
    utf8 = python.file_name_encoding.lower().replace("-", "") == "utf8"
    use_utf8 = remedies.set_variable(facts, "PYTHONUTF8", "1")
    cases = [(fine, PASS, found), (True, FAIL, found, install)]
    encodings = [(utf8, PASS, names), (True, WARN, names, use_utf8)]
    return [
        check("software.python", "Python", "Python 3.10 or newer, 64-bit", cases),
        check("software.encoding", "Encoding", "utf-8 file names", encodings),
    ]


def _package(facts: Facts, wanted: Requirement) -> Check:
    name, version = wanted.name, wanted.installed
    trouble, note = (WARN, " (only slower without it)") if name in SPEED_ONLY else (FAIL, "")
    update = remedies.pip(facts, "install", f"{name}{wanted.specifier}")
    cases = [
        (version is None, trouble, f"not installed{note}", remedies.setup(facts)),
        (version and satisfies(version, wanted.specifier), PASS, version),
        (True, trouble, version, update),
    ]
    return check(f"software.{name.lower()}", name, f"{name} {wanted.specifier}", cases)


def _loads(facts: Facts) -> Check:
    loaded, own, pair = facts.loaded, facts.python.project_python, remedies.same_pair(facts)
    missing = "not installed in this Python"
    missing += f"; to use the project's environment: {own} check_compatibility.py" if own else ""
    began = loaded.unfinished if loaded else None
    cases = [
        (loaded is None, FAIL, missing, remedies.setup(facts)),
        (loaded and loaded.error, FAIL, loaded and loaded.error, pair),
        (began in ("starting Python", "loading torch"), FAIL, f"{began}: {loaded and loaded.ended}", pair),
        (True, PASS, facts.torch_files.version or "yes"),
    ]
    return check("torch.loads", "PyTorch loads", "import torch works", cases)


def _version(facts: Facts) -> Check:
    wanted = next(r.specifier for r in facts.requirements if r.name == "torch")
    version, expected = facts.torch_files.version, f"torch {wanted}"
    cases = [
        (version is None, SKIP, "not installed", "", expected),
        (version and satisfies(version, wanted), PASS, version),
        (True, FAIL, version, remedies.same_pair(facts)),
    ]
    return check("torch.version", "PyTorch", expected, cases)


def _pair(facts: Facts) -> Check:
    """Whether torch and torchvision have the same build and compatible versions."""
    files, loaded = facts.torch_files, facts.loaded
    torch, vision, wants = files.version or "", files.vision_version, files.vision_wants_torch
    problems = []
    if vision is not None and build(torch) != build(vision):
        problems.append(": two different builds")
    elif vision is not None and wants and not satisfies(torch, wants):
        problems.append(": built for another torch")
    if loaded and loaded.vision_error:
        problems.append(f" ({loaded.vision_error})")
    if loaded and loaded.unfinished == "loading torchvision":
        problems.append(f" ({loaded.ended})")
    found = f"torch {torch}, torchvision {vision or 'not installed'}{''.join(problems)}"
    expected = "the same build" + (f"; this torchvision requires torch {wants}" if wants else "")
    cases = [
        (not torch, SKIP, NO_TORCH),
        (vision is not None and not problems, PASS, found),
        (True, FAIL, found, remedies.same_pair(facts)),
    ]
    return check("torch.pair", "torch + torchvision", expected, cases)


def _build(facts: Facts) -> list[Check]:
    """Whether the build can use the card, and whether torch.compile has what it needs."""
    files, cards = facts.torch_files, facts.smi.cards
    runtime = f"CUDA {files.cuda}" if files.cuda else f"ROCm {files.hip}" if files.hip else "no CUDA"
    found, for_cards = f"{files.version} ({runtime})", files.cuda or files.hip
    slower = "training runs without torch.compile, only slower"
    builds = [
        (files.version is None, SKIP, NO_TORCH),
        (for_cards or not cards, PASS, found, "", "a CUDA build if there is an NVIDIA card"),
        (True, FAIL, found, remedies.suitable_build(facts)),
    ]
    compilers = [
        (files.version is None, SKIP, NO_TORCH),
        (facts.host.c_compiler, PASS, facts.host.c_compiler),
        # TinyCC: github.com/triton-lang/triton-windows
        (facts.on_windows, SKIP, "none on PATH; triton-windows includes its own"),
        (True, WARN, f"none: {slower}", remedies.compiler(facts)),
    ]
    return [
        check(
            "torch.build",
            "Build of PyTorch",
            f"a CUDA build for the {cards[0].name if cards else ''}",
            builds,
        ),
        _triton(facts, slower),
        check("torch.compiler", "C compiler", "gcc or clang, which torch.compile calls", compilers),
    ]


def _triton(facts: Facts, slower: str) -> Check:
    """Whether Triton, which torch.compile uses on cards, has the version that torch expects."""
    files = facts.torch_files
    torch, ours = files.version or "", files.triton_version
    minor = triton_for_windows(torch) if facts.on_windows else ""
    wanted = f"=={minor}.*" if facts.on_windows else files.triton_wanted
    none = f"there is none for torch {torch} on Windows: training runs without torch.compile"
    other_torch = remedies.setup(facts, remedies.suggested(facts))
    install = remedies.pip(facts, "install", f"{files.triton_name}{wanted}")
    cases = [
        (not torch or not (files.cuda or files.hip), SKIP, "only builds for cards use it"),
        (minor is None, WARN, none, other_torch, "a torch between 2.10 and 2.14"),
        (wanted is None, SKIP, f"torch {torch} does not state which version it needs"),
        (ours and satisfies(ours, wanted or ""), PASS, ours),
        (True, WARN, f"{ours or 'not installed'}: {slower}", install),
    ]
    return check("torch.triton", "Triton", f"{files.triton_name} {wanted}", cases)
