"""Checks of Python, the packages and the build of PyTorch."""

from functools import partial

from vae.checks import cuda_builds, remedies
from vae.checks.facts import Facts, Requirement
from vae.checks.table import FAIL, PASS, SKIP, WARN, Cases, Check
from vae.checks.versions import build, satisfies

MIN_PYTHON = (3, 10)
# Everything works without these, only slower; without simplejpeg, damage inside JPEGs is not detected.
SPEED_ONLY = ("pyvips", "pyvips-binary", "simplejpeg")
NO_TORCH = "PyTorch is not installed"
SLOWER = "training runs without torch.compile, only slower"


def packages(facts: Facts) -> list[Check]:
    """A check for each line of requirements.txt; torch and torchvision have their own."""
    return [
        Check(f"software.{r.name.lower()}", r.name, f"{r.name} {r.specifier}", partial(_package, r))
        for r in facts.requirements
        if r.name not in ("torch", "torchvision")
    ]


def _package(wanted: Requirement, facts: Facts) -> Cases:
    name, version = wanted.name, wanted.installed
    trouble, note = (WARN, " (only slower without it)") if name in SPEED_ONLY else (FAIL, "")
    yield version is None, trouble, f"not installed{note}", remedies.setup(facts)
    yield satisfies(version or "", wanted.specifier), PASS, version
    yield True, trouble, version, remedies.pip(facts, "install", f"{name}{wanted.specifier}")


def _python(facts: Facts) -> Cases:
    python = facts.python
    found = f"{'.'.join(map(str, python.version))}, {python.bits}-bit, "
    found += "in a virtual environment" if python.in_environment else "the system's own"
    yield python.version >= MIN_PYTHON and python.bits == 64, PASS, found
    yield True, FAIL, found, f"install Python 3.12, 64-bit, then {remedies.setup(facts)}"


def _encoding(facts: Facts) -> Cases:
    names = facts.python.file_name_encoding
    found = f"file names {names}, texts {facts.python.text_encoding}"
    # We always pass an encoding when we read or write text; Python alone decides how file names are decoded.
    yield names.lower().replace("-", "") == "utf8", PASS, found
    yield True, WARN, found, remedies.set_variable(facts, "PYTHONUTF8", "1")


def _loads(facts: Facts) -> Cases:
    loaded, own = facts.loaded, facts.python.project_python
    hint = f"; to use the project's environment: {own} check_compatibility.py" if own else ""
    yield not loaded.installed, FAIL, f"not installed in this Python{hint}", remedies.setup(facts)
    yield loaded.error, FAIL, loaded.error, remedies.same_pair(facts)
    ended = f"{loaded.unfinished}: {loaded.ended}"
    crashed = loaded.unfinished in ("starting Python", "loading torch")
    yield crashed, FAIL, ended, remedies.same_pair(facts)
    yield True, PASS, facts.torch_files.version or "yes"


def _version(facts: Facts) -> Cases:
    wanted = next(r.specifier for r in facts.requirements if r.name == "torch")
    version = facts.torch_files.version
    yield version is None, SKIP, "not installed"
    yield satisfies(version or "", wanted), PASS, version
    yield True, FAIL, version, remedies.same_pair(facts), f"torch {wanted}"


def _pair(facts: Facts) -> Cases:
    files, loaded = facts.torch_files, facts.loaded
    torch, vision, wants = files.version or "", files.vision_version, files.vision_wants_torch
    yield not torch, SKIP, NO_TORCH
    problems = []
    if vision is not None and build(torch) != build(vision):
        problems.append(": two different builds")
    elif vision is not None and wants and not satisfies(torch, wants):
        problems.append(": built for another torch")
    if loaded.vision_error:
        problems.append(f" ({loaded.vision_error})")
    if loaded.unfinished == "loading torchvision":
        problems.append(f" ({loaded.ended})")
    found = f"torch {torch}, torchvision {vision or 'not installed'}{''.join(problems)}"
    yield vision is not None and not problems, PASS, found
    expected = "the same build" + (f"; this torchvision requires torch {wants}" if wants else "")
    yield True, FAIL, found, remedies.same_pair(facts), expected


def _build(facts: Facts) -> Cases:
    files, cards = facts.torch_files, facts.smi.cards
    runtime = f"CUDA {files.cuda}" if files.cuda else f"ROCm {files.hip}" if files.hip else "no CUDA"
    found = f"{files.version} ({runtime})"
    yield files.version is None, SKIP, NO_TORCH
    yield files.cuda or files.hip or not cards, PASS, found
    yield True, FAIL, found, remedies.suitable_build(facts), f"a CUDA build for the {cards[0].name}"


def _triton(facts: Facts) -> Cases:
    """torch.compile needs the version of Triton that torch expects."""
    files = facts.torch_files
    torch, ours, wanted = files.version or "", files.triton_version, files.triton_wanted
    yield not torch or not (files.cuda or files.hip), SKIP, "only builds for cards use it"
    if facts.on_windows:  # torch's metadata does not list Triton for Windows
        minor = cuda_builds.triton_for_windows(torch)
        none = f"there is none for torch {torch} on Windows: training runs without torch.compile"
        other_torch = remedies.setup(facts, remedies.suggested(facts))
        yield minor is None, WARN, none, other_torch, "a torch between 2.10 and 2.14"
        wanted = f"=={minor}.*"
    yield wanted is None, SKIP, f"torch {torch} does not state which version it needs"
    yield ours and satisfies(ours, wanted or ""), PASS, ours
    install = remedies.pip(facts, "install", f"{files.triton_name}{wanted}")
    yield True, WARN, f"{ours or 'not installed'}: {SLOWER}", install, f"{files.triton_name} {wanted}"


def _compiler(facts: Facts) -> Cases:
    yield facts.torch_files.version is None, SKIP, NO_TORCH
    yield facts.host.c_compiler, PASS, facts.host.c_compiler
    # TinyCC: github.com/triton-lang/triton-windows
    yield facts.on_windows, SKIP, "none on PATH; triton-windows includes its own"
    yield True, WARN, f"none: {SLOWER}", remedies.compiler(facts)


def _architectures(facts: Facts) -> Cases:
    """Without code for the card, every kernel fails with `no kernel image`."""
    arch_list, cards = facts.loaded.arch_list, facts.capabilities
    yield not facts.loaded.installed, SKIP, "PyTorch does not load"
    yield not arch_list or facts.torch_files.hip, SKIP, "no card" if arch_list else "this build has no CUDA"
    yield not cards, SKIP, "no card"
    runs = [cuda_builds.runs_on(capability, arch_list) for _, capability in cards]
    yield all(runs), PASS, " ".join(arch_list)
    names = [(name, f"sm_{major}{minor}") for name, (major, minor) in cards]
    unsupported = [f"{name} ({sm})" for (name, sm), fine in zip(names, runs, strict=True) if not fine]
    found = f"none for {', '.join(unsupported)}: only {' '.join(arch_list)}"
    expected = ", ".join(sorted({sm for _, sm in names}))
    numbers = ",".join(str(index) for index, supported in enumerate(runs) if supported)
    hide = remedies.set_variable(facts, "CUDA_VISIBLE_DEVICES", numbers)
    yield runs[0], WARN, found, hide, expected  # training uses the first card by default
    yield True, FAIL, found, remedies.suitable_build(facts), expected


TORCH = [
    Check("torch.loads", "PyTorch loads", "import torch works", _loads),
    Check("torch.version", "PyTorch", "", _version),
    Check("torch.pair", "torch + torchvision", "", _pair),
    Check("torch.build", "Build of PyTorch", "", _build),
    Check("torch.triton", "Triton", "", _triton),
    Check("torch.compiler", "C compiler", "gcc or clang, which torch.compile calls", _compiler),
    Check("torch.architectures", "Code for the card", "", _architectures),
]
SOFTWARE = [
    Check("software.python", "Python", "Python 3.10 or newer, 64-bit", _python),
    Check("software.encoding", "Encoding", "utf-8 file names", _encoding),
]
