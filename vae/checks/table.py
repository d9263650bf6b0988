"""The table of checks: an id, a title, what is expected, and the cases, a function of the facts.

Cases are (condition, status, what was found, remedy, another text for `expected`); the last two may be
missing. The first case that applies is the result, so the last condition of a function is True. A warning or
failure needs a remedy.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from vae.checks import cuda_builds
from vae.checks.facts import TIME_LIMIT, Facts
from vae.checks.machine import VGG_FILE, build, satisfies
from vae.config.options import Config
from vae.config.recipes import RECIPES
from vae.system.addresses import is_remote
from vae.system.console import fetch_command
from vae.system.host import GIB, MIB, decoding_processes
from vae.system.script import CACHE_VARIABLES, missing_runtime


def setup_command(facts: Facts, build: str | None = None) -> str:
    """The set-up script, with `--torch` if another build is needed."""
    script = "setup_windows.bat" if facts.on_windows else "./setup.sh"
    return f"{script} --torch {build}" if build else script


def pip_command(facts: Facts, *words: str) -> str:
    """A pip command of the Python that runs now, quoted for the shell."""
    command = (facts.python or "python", "-m", "pip", *words)
    if facts.on_windows:
        return " ".join(f'"{word}"' if set(word) & set(" <>=&") else word for word in command)
    return shlex.join(command)


def reinstall_pair(facts: Facts) -> str:
    """Reinstall torch and torchvision, both from the index of one build."""
    tag = (facts.torch_files.version or "").partition("+")[2] or suggested_here(facts) or "cpu"
    index = f"https://download.pytorch.org/whl/{tag}"
    command = pip_command(facts, "install", "--force-reinstall", "torch", "torchvision", "--index-url", index)
    is_slow = facts.loaded.ended == TIME_LIMIT
    return f"end other programs and check again; if that does not help: {command}" if is_slow else command


def suggested_here(facts: Facts) -> str | None:
    """The build that the set-up installs here by default; None if the driver must be updated first."""
    branch = cuda_builds.driver_branch(facts.smi.driver) if facts.smi.driver else None
    newest = max((card.capability for card in facts.cards if card.capability), default=None)
    if branch is None and facts.loaded.devices:
        # No nvidia-smi, as in some containers: the driver is at least what the installed build needs.
        branch = cuda_builds.needed_branch(facts.torch_files.cuda, newest)
    return cuda_builds.suggested_build(branch, newest)


def install_suitable_build(facts: Facts) -> str:
    """Install the build that suits card and driver, or update the driver if that must come first."""
    build = suggested_here(facts)
    return setup_command(facts, build) if build else update_driver(facts)


def update_driver(facts: Facts, branch: int = cuda_builds.NEWEST_DRIVER) -> str:
    """The remedy that installs a driver of at least `branch`."""
    if facts.on_windows or facts.host.wsl:
        where = "in Windows, " if facts.host.wsl else ""
        return f"{where}install driver {branch} or newer from https://www.nvidia.com/drivers, then restart"
    return f"install driver {branch} or newer, then restart (Ubuntu: sudo ubuntu-drivers install)"


def compiler_command(facts: Facts) -> str:
    """The command that installs a C and C++ compiler."""
    if facts.on_windows:
        return "winget install Microsoft.VisualStudio.2022.BuildTools"
    return "xcode-select --install" if facts.host.system == "Darwin" else "sudo apt install gcc g++"


def remedy_of_error(facts: Facts, error: str) -> str:
    """The remedy for an error message of PyTorch, CUDA or the compiler."""
    if "no kernel image" in error or "not compatible with the current PyTorch" in error:
        return install_suitable_build(facts)
    if variable := next((name for name in CACHE_VARIABLES if name in error), None):
        return f"set {variable} to a folder that can be written, or unset it"
    if "out of memory" in error.lower():
        return "end the processes that use the card's memory and that you do not need: nvidia-smi lists them"
    return compiler_command(facts) if "compiler" in error.lower() else reinstall_pair(facts)


def show_cards(facts: Facts, numbers: str = "") -> str:
    """The command that makes PyTorch use the cards with these numbers, or every card."""
    if facts.on_windows:
        return f"set CUDA_VISIBLE_DEVICES={numbers}"
    return f"export CUDA_VISIBLE_DEVICES={numbers}" if numbers else "unset CUDA_VISIBLE_DEVICES"


PASS = "pass"
WARN = "warn"
FAIL = "fail"
SKIP = "skip"
Cases = Iterator[tuple[Any, ...]]

# Everything works without these, only slower; without simplejpeg, damage inside JPEGs is not detected.
SPEED_ONLY = ("pyvips", "pyvips-binary", "simplejpeg")
NO_TORCH = "PyTorch is not installed"
SLOWER = "training runs without torch.compile, only slower"

HIDING = ("", "-1", "nodevfiles")  # values of CUDA_VISIBLE_DEVICES that hide every card

# Parameters of the default autoencoder (docs/results.md); a test compares this with the model.
DEFAULT_PARAMETERS = 83_819_683
CHECKPOINT_BYTES = DEFAULT_PARAMETERS * 4 * 4  # fp32 weights, both moments of AdamW, EMA weights
# --keep_checkpoints, the best, the last of the stage, and the one being written.
CHECKPOINTS = Config().run.keep_checkpoints + 3
# Resident memory of a process that has imported the trainer with torch 2.15 on Linux: 0.69 GiB measured.
# Forked decoding processes share most of it; on Windows each has its own copy.
PROCESS_BYTES = int(0.7 * GIB)
VGG_BYTES = 553_433_881  # size of torchvision's file
VGG_SHA256 = VGG_FILE.partition("-")[2].removesuffix(".pth")  # its first digits
VGG_URL = f"https://download.pytorch.org/models/{VGG_FILE}"
NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "glusterfs", "beegfs", "gpfs", "9p"),
    *("fuse.sshfs", "fuse.rclone", "fuse.gcsfuse", "fuse.s3fs", "fuse.glusterfs", "drvfs", "network"),
}
SYNCED = re.compile(
    r"^(onedrive|dropbox|google ?drive|icloud ?drive|nextcloud|pcloud|mobile documents)\b", re.I
)


class Result(NamedTuple):
    """`id` is stable between versions; the part before the point is the group."""

    id: str
    title: str
    status: str
    found: str
    expected: str = ""
    remedy: str = ""  # the exact command, or a sentence if no command fixes it

    @property
    def group(self) -> str:
        return self.id.split(".")[0]


class Check(NamedTuple):
    """A row of the table."""

    id: str
    title: str
    expected: str
    cases: Callable[[Facts], Cases]

    def result(self, facts: Facts) -> Result:
        _, status, text, *rest = next(case for case in self.cases(facts) if case[0])
        remedy, expected = (*rest, "", "")[:2]
        expected = (expected or self.expected) if status in (WARN, FAIL) else ""
        return Result(self.id, self.title, status, text, expected, remedy)


def judge(facts: Facts) -> list[Result]:
    """The result of every check; a pure function of the facts."""
    return [check.result(facts) for check in TABLE]


# --- packages and the build of PyTorch


def _packages(facts: Facts) -> Cases:
    wanted = [r for r in facts.requirements if r.name not in ("torch", "torchvision")]
    wrong = [r for r in wanted if not (r.installed and satisfies(r.installed, r.specifier))]
    yield not wrong, PASS, f"{len(wanted)} packages"
    names = ", ".join(f"{r.name} {r.installed or 'is missing'}" for r in wrong)
    expected = ", ".join(f"{r.name} {r.specifier}" for r in wrong)
    slower = all(r.name in SPEED_ONLY for r in wrong)
    yield slower, WARN, f"{names} (only slower without it)", setup_command(facts), expected
    yield True, FAIL, names, setup_command(facts), expected


def _loads(facts: Facts) -> Cases:
    loaded, own = facts.loaded, facts.project_python
    hint = f"; to use the project's environment: {own} check_compatibility.py" if own else ""
    yield not loaded.installed, FAIL, f"not installed in this Python{hint}", setup_command(facts)
    missing = missing_runtime(loaded.error or "")
    yield missing, FAIL, missing, setup_command(facts)
    yield loaded.error, FAIL, loaded.error, reinstall_pair(facts)
    crashed = loaded.unfinished in ("starting Python", "loading torch")
    yield crashed, FAIL, f"{loaded.unfinished}: {loaded.ended}", reinstall_pair(facts)
    yield True, PASS, facts.torch_files.version or "yes"


def _pair(facts: Facts) -> Cases:
    """torchvision of another build or version: `operator torchvision::nms does not exist`."""
    files, loaded = facts.torch_files, facts.loaded
    torch, vision = files.version or "", files.vision_version or ""
    required = next(r.specifier for r in facts.requirements if r.name == "torch")
    reinstall = reinstall_pair(facts)
    expected = f"torch {required} and torchvision of one build"
    text = f"torch {torch}, torchvision {vision or 'not installed'}"
    yield not torch, SKIP, NO_TORCH
    yield not vision or not satisfies(torch, required), FAIL, text, reinstall, expected
    other_build = build(torch) != build(vision)
    text += ": two different builds" if other_build else ""
    error = loaded.ended if loaded.unfinished == "loading torchvision" else loaded.vision_error
    text += f" ({error})" if error else ""
    yield other_build, FAIL, text, reinstall, expected
    yield error, FAIL, text, remedy_of_error(facts, error or ""), expected
    yield True, PASS, text


def _build(facts: Facts) -> Cases:
    """Without code for the card, every kernel fails with `no kernel image`."""
    files, arch_list = facts.torch_files, facts.loaded.arch_list
    runtime = f"CUDA {files.cuda}" if files.cuda else f"ROCm {files.hip}" if files.hip else "no CUDA"
    text = f"{files.version} ({runtime})"
    yield files.version is None, SKIP, NO_TORCH
    yield files.hip or not facts.cards, PASS, text
    expected = f"a CUDA build for the {facts.card_names}"
    yield not files.cuda, FAIL, text, install_suitable_build(facts), expected
    runs = [not card.capability or cuda_builds.runs_on(card.capability, arch_list) for card in facts.cards]
    yield not arch_list or all(runs), PASS, text
    others = [card for card, fine in zip(facts.cards, runs, strict=True) if not fine]
    names = [f"{card.name} (sm_{''.join(map(str, card.capability or ()))})" for card in others]
    text += f" has no code for {', '.join(names)}: only {' '.join(arch_list)}"
    numbers = ",".join(str(index) for index, supported in enumerate(runs) if supported)
    yield runs[0], WARN, text, show_cards(facts, numbers), expected  # training uses the first card
    yield True, FAIL, text, install_suitable_build(facts), expected


def _triton(facts: Facts) -> Cases:
    """torch.compile needs Triton. On Windows, torch's own metadata does not name a version."""
    files = facts.torch_files
    torch = files.version or ""
    ours = files.triton_version
    yield not torch or not (files.cuda or files.hip), SKIP, "only builds for cards use it"
    minor = cuda_builds.triton_for_windows(torch) if facts.on_windows else None
    none = f"there is none for torch {torch} on Windows: training runs without torch.compile"
    other_torch = setup_command(facts, suggested_here(facts))
    yield facts.on_windows and not minor, WARN, none, other_torch, "a torch between 2.10 and 2.14"
    wanted = f"triton-windows=={minor}.*" if facts.on_windows else "triton"
    yield ours and (not minor or satisfies(ours, f"=={minor}.*")), PASS, ours
    install = pip_command(facts, "install", wanted)
    yield True, WARN, f"{ours or 'not installed'}: {SLOWER}", install, wanted


def _compiler(facts: Facts) -> Cases:
    yield facts.torch_files.version is None, SKIP, NO_TORCH
    yield facts.host.c_compiler, PASS, facts.host.c_compiler
    # TinyCC: github.com/triton-lang/triton-windows
    yield facts.on_windows, SKIP, "none on PATH; triton-windows includes its own"
    yield True, WARN, f"none: {SLOWER}", compiler_command(facts)


# --- cards and their driver


def _present(facts: Facts) -> Cases:
    smi = facts.smi
    devices = facts.loaded.devices
    update = update_driver(facts)
    message = f"nvidia-smi: {smi.message}"
    yield smi.status == "answered" and smi.cards, PASS, facts.card_names
    restart = f"restart the machine; if that does not help: {update}"
    yield smi.status in ("hanging", "failed"), WARN if devices else FAIL, message, restart
    # PyTorch finds the card although nvidia-smi is missing
    note = "" if facts.torch_files.hip else "; nvidia-smi is missing, so its state is unknown"
    yield devices, PASS, facts.card_names + note
    why = "no nvidia-smi" if smi.status == "missing" else "the driver lists no card"
    on_cpu = f"no NVIDIA card ({why}): training runs on the CPU, which is only fast enough for trials"
    elsewhere = "train on a machine with an NVIDIA card"
    yield facts.host.system == "Darwin", WARN, f"{on_cpu}; Apple's GPU (MPS) is not used", elsewhere
    yield True, WARN, on_cpu, f"if the machine has a card: {update}"


def _driver(facts: Facts) -> Cases:
    """The driver must be new enough for PyTorch's CUDA version and for the card."""
    cuda = facts.torch_files.cuda
    driver = facts.smi.driver or ""
    capability = next((card.capability for card in facts.cards if card.capability), None)
    needed = cuda_builds.needed_branch(cuda, capability)
    branch = cuda_builds.driver_branch(driver)
    yield not driver, SKIP, "the driver version is unknown"
    yield branch is None or branch >= needed, PASS, driver
    reasons = [f"CUDA {cuda} needs {cuda_builds.needed_branch(cuda, None)}"] if cuda else []
    if capability and capability >= cuda_builds.BLACKWELL:
        reasons.append(f"RTX 50 and B200 need {cuda_builds.BLACKWELL_DRIVER}")
    remedy = update_driver(facts, needed)
    older = suggested_here(facts)
    if older:
        remedy += f"; or install the build for this driver: {setup_command(facts, older)}"
    yield True, FAIL, f"{driver}: too old", remedy, f"{needed} or newer: {', '.join(reasons)}"


def _usable(facts: Facts) -> Cases:
    loaded = facts.loaded
    yield not loaded.installed or loaded.error, SKIP, "PyTorch does not load"
    sizes = "; ".join(f"{card.name}, {(card.memory_mib or 0) / 1024:.1f} GiB" for card in loaded.devices)
    yield loaded.devices, PASS, sizes
    hung = loaded.unfinished == "looking for cards"
    yield hung, FAIL, f"looking for cards: {loaded.ended}", "restart the machine"
    value = facts.host.visible_devices
    hidden = value is not None and value.strip().lower() in HIDING
    yield hidden, WARN, f"CUDA_VISIBLE_DEVICES={value} hides every card", show_cards(facts)
    yield not facts.smi.cards, SKIP, "there is no card"
    yield not facts.torch_files.cuda, SKIP, "this build of PyTorch has no CUDA (see Build of PyTorch)"
    _, status, _, *rest = next(case for case in _driver(facts) if case[0])
    remedy = rest[0] if status == FAIL else "restart the machine; start a container with --gpus all"
    yield True, FAIL, loaded.cuda_message or "no, without an error message", remedy


def _computes(facts: Facts) -> Cases:
    """A computation finds missing libraries and a card that hangs, which no version number shows."""
    loaded = facts.loaded
    ended, error = loaded.ended or "", loaded.compute_error or ""
    yield not loaded.installed or loaded.error, SKIP, "PyTorch does not load"
    yield loaded.unfinished == "computing", FAIL, ended, remedy_of_error(facts, ended)
    yield loaded.unfinished, SKIP, f"not reached: the process ended while {loaded.unfinished} ({ended})"
    yield error, FAIL, error, remedy_of_error(facts, error)
    yield True, PASS, "on the card" if loaded.devices else "on the CPU"


# --- the system and its disks


def workers(facts: Facts) -> int:
    """Number of decoding processes that --num_workers auto starts on this machine."""
    return decoding_processes(facts.host.cores_usable, facts.on_windows)


def _prefetched(facts: Facts, profile: str | None = None) -> int:
    """Bytes of the uint8 batches that the decoding processes prepare ahead, by a profile or the defaults."""
    values = RECIPES[profile].values if profile else {}
    size = values.get("image_size", Config().data.image_size)
    batch = values.get("batch_size", Config().run.batch_size)
    return batch * 3 * size * size * Config().data.prefetch_factor * workers(facts)


def _amount(available: int, needed: int, least: int, text: str, remedy: str, expected: str) -> Cases:
    """Enough bytes for the whole purpose, or at least for a smaller one."""
    yield available >= needed, PASS, text
    yield True, WARN if available >= least else FAIL, text, remedy, expected


def _memory(facts: Facts) -> Cases:
    free, total = facts.host.memory_free, facts.host.memory_total
    needed = _prefetched(facts, "standard") + PROCESS_BYTES * (1 + workers(facts))
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB can be used"
    expected = f"{needed / GIB:.1f} GiB for profile standard with {workers(facts)} decoding processes"
    remedy = "end other programs, or train with --num_workers 1"
    yield from _amount(free, needed, 2 * PROCESS_BYTES, text, remedy, expected)


def _shm(facts: Facts) -> Cases:
    """If /dev/shm is full, decoding dies of a bus error."""
    shared = facts.host.shared_memory
    standard = _prefetched(facts, "standard")
    default = _prefetched(facts)
    yield facts.host.system != "Linux", SKIP, "only Linux passes batches through it"
    text = "missing" if shared is None else f"{shared / GIB:.2f} GiB"
    enlarge = f"docker run --shm-size={max(1, -(-standard // GIB))}g, or train with --num_workers 0"
    expected = f"{standard / GIB:.1f} GiB for profile standard, {default / MIB:.0f} MiB by default"
    yield from _amount(shared or 0, standard, default, text, enlarge, expected)


def _folder(index: int, facts: Facts) -> Cases:
    folder = facts.folders[index]
    path, flag = folder.path, folder.flag
    yield is_remote(path), SKIP, f"{path} is on a remote store"
    permissions = f"correct its permissions, or use another folder: {flag} DIR"
    yield folder.problem, FAIL, f"{path}: {folder.problem}", permissions
    no_images = not folder.exists and flag == "--data_path"
    absent = f"{path} does not exist"
    yield no_images and folder.given, FAIL, absent, f"set {flag} to an existing folder of images"
    yield no_images, SKIP, absent
    text = path if folder.exists else f"{path}, will be created in {folder.nearest}"
    elsewhere = f"use a local folder: {flag} DIR"
    service = synced_by(folder.nearest, windows=facts.on_windows)
    yield service, WARN, f"{text}: {service} uploads every file that is written there", elsewhere
    kind = "a Windows drive mounted in WSL" if facts.host.wsl else "a network drive"
    slow = f"{text}: {kind} ({folder.file_system}), slow with many files"
    yield folder.file_system in NETWORK, WARN, slow, elsewhere
    yield True, PASS, text


def synced_by(path: str, *, windows: bool) -> str | None:
    """The part of a path that names a syncing service (OneDrive - Company, Dropbox); None without one."""
    parts = (PureWindowsPath if windows else PurePosixPath)(path).parts
    return next((part for part in parts if SYNCED.match(part)), None)


def _space(facts: Facts) -> Cases:
    free = facts.folders[0].free
    needed = CHECKPOINT_BYTES * CHECKPOINTS
    yield free is None, SKIP, "unknown"
    expected = f"{needed / GIB:.1f} GiB: {CHECKPOINTS} checkpoints of {CHECKPOINT_BYTES / GIB:.2f} GiB"
    text = f"{(free or 0) / GIB:.1f} GiB"
    remedy = "use another folder: --output_dir DIR"
    yield from _amount(free or 0, needed, 2 * CHECKPOINT_BYTES, text, remedy, expected)


def _vgg(facts: Facts) -> Cases:
    path, digest = facts.vgg_path, facts.vgg_sha256
    homeless = "this user has no home folder (HOME is not set)"
    yield path.startswith("~"), WARN, homeless, "set TORCH_HOME to a folder"
    yield digest and digest.startswith(VGG_SHA256), PASS, path
    text = "not downloaded yet: the first run downloads them" if digest is None else "incomplete or damaged"
    fetch = fetch_command(VGG_URL, path, windows=facts.on_windows)
    yield True, WARN, f"{text} (not needed with --perceptual_weight 0)", fetch


LOCAL = "a folder on a local disk, not a synced one"
VGG = f"{VGG_FILE}, {VGG_BYTES / MIB:.0f} MiB, in PyTorch's cache"

TABLE = [  # in the order in which problems must be fixed
    Check("torch.loads", "PyTorch loads", "import torch works", _loads),
    Check("torch.pair", "torch + torchvision", "", _pair),
    Check("torch.build", "Build of PyTorch", "", _build),
    Check("torch.triton", "Triton", "", _triton),
    Check("torch.compiler", "C compiler", "gcc or clang, which torch.compile calls", _compiler),
    Check("card.present", "Card", "an NVIDIA card whose driver answers nvidia-smi", _present),
    Check("card.driver", "Driver", "", _driver),
    Check("card.usable", "Usable by PyTorch", "torch.cuda.is_available()", _usable),
    Check("card.computes", "Computes", "the values of a convolution and its gradient", _computes),
    Check("software.packages", "Packages", "", _packages),
    Check("system.memory", "Main memory", "", _memory),
    Check("system.shm", "/dev/shm", "", _shm),
    Check("disk.runs", "Folder of the runs", LOCAL, partial(_folder, 0)),
    Check("disk.images", "Folder of the images", LOCAL, partial(_folder, 1)),
    Check("disk.space", "Free disk space", "", _space),
    Check("disk.vgg", "Weights of LPIPS", VGG, _vgg),
]
