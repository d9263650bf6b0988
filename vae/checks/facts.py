"""Facts about a machine, as plain data: machine.py fills them in, the checks only read them.

Sizes are in bytes unless a name contains another unit. None means unknown.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Requirement:
    """One line of requirements.txt, and the version that is installed."""

    name: str
    specifier: str  # such as >=2.10,!=2.13.0+cpu
    installed: str | None


@dataclass(frozen=True)
class TorchFiles:
    """Versions read from the files of the installed packages, without importing them."""

    version: str | None = None  # with its build: 2.15.0+cu132
    cuda: str | None = None  # CUDA version of the build: 13.2
    hip: str | None = None
    vision_version: str | None = None
    triton_version: str | None = None  # triton-windows on Windows


@dataclass(frozen=True)
class Card:
    """A card as PyTorch or nvidia-smi reports it."""

    name: str
    capability: tuple[int, int] | None = None
    memory_mib: int | None = None


TIME_LIMIT = "it exceeded the time limit"


@dataclass(frozen=True)
class LoadedTorch:
    """The facts that PyTorch reports after it is imported, in a child process."""

    installed: bool = True
    error: str | None = None  # why it cannot be imported
    vision_error: str | None = None
    arch_list: tuple[str, ...] = ()
    cuda_message: str | None = None  # PyTorch's message if CUDA cannot be used
    devices: tuple[Card, ...] = ()
    compute_error: str | None = None  # a convolution and its gradient failed, on the card if there is one
    unfinished: str | None = None  # the part that was running when the process crashed or timed out
    ended: str | None = None  # the signal, exit code or time limit that ended it then


@dataclass(frozen=True)
class Smi:
    """The result of running nvidia-smi."""

    status: Literal["answered", "missing", "hanging", "failed"]
    message: str = ""
    driver: str | None = None
    cards: tuple[Card, ...] = ()


@dataclass(frozen=True)
class Folder:
    """A folder that training reads or writes."""

    flag: str
    path: str
    given: bool  # set on the command line
    exists: bool
    nearest: str  # the folder itself, or its nearest parent that exists; empty on a remote store
    free: int | None = None
    file_system: str | None = None
    problem: str | None = None  # why it cannot be read or written


@dataclass(frozen=True)
class HostFacts:
    system: str  # Linux, Windows, Darwin
    wsl: bool = False
    cores_usable: int = 1
    memory_total: int = 0
    memory_free: int = 0  # with the limits of a container
    shared_memory: int | None = None  # size of /dev/shm
    c_compiler: str | None = None
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES


@dataclass(frozen=True)
class Facts:
    """All facts about one machine."""

    project: str
    python: str  # the program that runs now
    project_python: str | None  # Python of the project's own environment, if another Python runs now
    requirements: tuple[Requirement, ...]
    torch_files: TorchFiles
    loaded: LoadedTorch
    smi: Smi
    host: HostFacts
    folders: tuple[Folder, ...]
    vgg_path: str
    vgg_sha256: str | None  # None: the file does not exist

    @property
    def on_windows(self) -> bool:
        return self.host.system == "Windows"

    @property
    def cards(self) -> tuple[Card, ...]:
        """Every card, as PyTorch or else nvidia-smi reports it."""
        return self.loaded.devices or self.smi.cards

    @property
    def card_names(self) -> str:
        return ", ".join(card.name for card in self.cards)
