"""Facts of machines for the checks: a desktop with an RTX 5090 that passes every check, and variants."""

from dataclasses import replace

from vae.checks.facts import Card, Facts, Folder, HostFacts, LoadedTorch, Requirement, Smi, TorchFiles
from vae.checks.table import VGG_SHA256, Result, judge
from vae.system.host import GIB

ARCHS_130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
ARCHS_126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")

RTX_5090 = Card("NVIDIA GeForce RTX 5090", (12, 0), 32607)


def folder(flag: str, path: str, **changed) -> Folder:
    """A folder without problems, with some of its facts changed."""
    facts = {"given": True, "exists": True, "nearest": path, "free": 500 * GIB, "file_system": "ext4"}
    return Folder(flag, path, **{**facts, **changed})


DESKTOP = Facts(
    project="/home/me/vae",
    python="/home/me/vae/.venv/bin/python",
    project_python=None,
    requirements=(
        Requirement("torch", ">=2.10,!=2.13.0+cpu", "2.14.0"),
        Requirement("torchvision", ">=0.25", "0.29.0"),
        Requirement("Pillow", ">=13", "13.0.0"),
        Requirement("simplejpeg", ">=1.8", "1.9.0"),
    ),
    torch_files=TorchFiles(
        version="2.14.0+cu130", cuda="13.0", vision_version="0.29.0+cu130", triton_version="3.8.0"
    ),
    loaded=LoadedTorch(arch_list=ARCHS_130, devices=(Card("NVIDIA GeForce RTX 5090", (12, 0), 32129),)),
    smi=Smi("answered", "", "580.95.05", (RTX_5090,)),
    host=HostFacts(
        system="Linux",
        cores_usable=16,
        memory_total=64 * GIB,
        memory_free=55 * GIB,
        shared_memory=32 * GIB,
        c_compiler="/usr/bin/gcc",
    ),
    folders=(
        folder("--output_dir", "./outputs", exists=False, nearest="/home/me/vae"),
        folder("--data_path", "./data/train"),
    ),
    vgg_path="/home/me/.cache/torch/hub/checkpoints/vgg16-397923af.pth",
    vgg_sha256=VGG_SHA256,
)

WINDOWS = replace(
    DESKTOP,
    host=replace(DESKTOP.host, system="Windows", shared_memory=None),
    python="C:\\Users\\Jörg B\\vae\\.venv\\Scripts\\python.exe",
    torch_files=replace(DESKTOP.torch_files, triton_version="3.8.0.post26"),
)
WITHOUT_TORCH = replace(
    DESKTOP,
    loaded=LoadedTorch(installed=False),
    torch_files=TorchFiles(),
    requirements=tuple(replace(r, installed=None) for r in DESKTOP.requirements),
)
NO_CARD = replace(
    DESKTOP,
    smi=Smi("missing"),
    loaded=replace(DESKTOP.loaded, devices=(), cuda_message="RuntimeError: Found no NVIDIA driver"),
)


def changed(facts: Facts = DESKTOP, **parts) -> Facts:
    """`facts` with some parts changed: changed(host={"wsl": 2}, smi=Smi("missing"))."""
    return replace(
        facts,
        **{
            name: replace(getattr(facts, name), **part) if isinstance(part, dict) else part
            for name, part in parts.items()
        },
    )


def verdict(facts: Facts, check: str) -> Result:
    """The result of the check with this id."""
    return next(result for result in judge(facts) if result.id == check)


def statuses(facts: Facts, status: str) -> set[str]:
    """The ids of all checks with this status."""
    return {result.id for result in judge(facts) if result.status == status}
