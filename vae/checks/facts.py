"""Facts about a machine, as plain data: gather.py fills them in, the checks only read them.

Sizes are in bytes and times in seconds unless a name contains another unit. None means unknown.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class PythonFacts:
    version: tuple[int, int, int]
    bits: int
    executable: str
    in_environment: bool  # a virtual environment of any kind
    project_python: str | None  # Python of the project's own environment, if another Python runs now
    file_name_encoding: str
    text_encoding: str


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
    vision_wants_torch: str | None = None  # the specifier in torchvision's own metadata
    triton_version: str | None = None
    triton_name: str = "triton"  # triton-windows on Windows
    triton_wanted: str | None = None  # the specifier in torch's own metadata


@dataclass(frozen=True)
class CudaDevice:
    """A card as PyTorch reports it."""

    name: str
    capability: tuple[int, int]
    memory_total: int


@dataclass(frozen=True)
class KernelRun:
    """One test computation: its difference from the reference, or the error that stopped it."""

    name: str
    seconds: float = 0.0
    difference: float = 0.0  # relative, the largest over all results and gradients
    tolerance: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class LoadedTorch:
    """What PyTorch reports after it is imported, in a child process."""

    installed: bool = True
    error: str | None = None  # why it cannot be imported
    vision_error: str | None = None
    arch_list: tuple[str, ...] = ()
    cuda_available: bool = False
    cpu_bf16: str | None = None  # PrecisionSupport.bf16 of the CPU
    cuda_message: str | None = None  # PyTorch's message if CUDA cannot be used
    devices: tuple[CudaDevice, ...] = ()
    growing_segments: bool | None = None  # whether PyTorch allocates memory of the card in them
    kernels: tuple[KernelRun, ...] = ()
    unfinished: str | None = None  # what was running when the process crashed or timed out
    ended: str | None = None  # how it ended in that case


def _reported(field_of_smi: str) -> Any:
    """None unless nvidia-smi reports this field; its names: nvidia-smi --help-query-gpu."""
    return field(default=None, metadata={"query": field_of_smi})


@dataclass(frozen=True)
class SmiCard:
    """A card as nvidia-smi reports it."""

    index: int
    name: str
    memory_total_mib: int | None = _reported("memory.total")
    memory_used_mib: int | None = _reported("memory.used")
    capability: tuple[int, int] | None = _reported("compute_cap")
    pcie_generation: int | None = _reported("pcie.link.gen.current")
    pcie_generation_max: int | None = _reported("pcie.link.gen.max")
    pcie_width: int | None = _reported("pcie.link.width.current")
    pcie_width_max: int | None = _reported("pcie.link.width.max")
    power_draw_w: float | None = _reported("power.draw")
    power_limit_w: float | None = _reported("power.limit")
    power_default_w: float | None = _reported("power.default_limit")
    temperature_c: int | None = _reported("temperature.gpu")
    # NVML's bit mask of reasons for reduced clocks
    clock_reasons: int | None = _reported("clocks_event_reasons.active")


@dataclass(frozen=True)
class Smi:
    """The result of running nvidia-smi."""

    status: Literal["answered", "missing", "hanging", "failed"]
    message: str = ""
    driver: str | None = None
    cards: tuple[SmiCard, ...] = ()


@dataclass(frozen=True)
class Folder:
    """A folder that training reads or writes."""

    purpose: str
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
    release: str
    machine: str
    wsl: int = 0  # 0: none, else 1 or 2
    cores: int = 1
    cores_usable: int = 1
    memory_total: int = 0
    memory_free: int = 0
    memory_limit: int | None = None  # of the container
    shared_memory: int | None = None  # size of /dev/shm
    c_compiler: str | None = None
    variables: dict[str, str] = field(default_factory=dict)  # relevant environment variables
    long_paths: bool | None = None  # of Windows
    page_files: tuple[str, ...] | None = None  # lines of the registry's PagingFiles


@dataclass(frozen=True)
class Facts:
    """All facts about one machine."""

    project: str
    quick: bool
    python: PythonFacts
    requirements: tuple[Requirement, ...]
    torch_files: TorchFiles
    loaded: LoadedTorch
    smi: Smi
    host: HostFacts
    folders: tuple[Folder, ...]
    vgg_path: str
    vgg_bytes: int | None  # None: the file does not exist

    @property
    def on_windows(self) -> bool:
        return self.host.system == "Windows"

    @property
    def devices(self) -> tuple[CudaDevice, ...]:
        """The cards that PyTorch can use."""
        return self.loaded.devices

    @property
    def capabilities(self) -> list[tuple[str, tuple[int, int]]]:
        """Name and compute capability of every card, as PyTorch or else nvidia-smi reports them."""
        if self.devices:
            return [(card.name, card.capability) for card in self.devices]
        return [(card.name, card.capability) for card in self.smi.cards if card.capability]

    @property
    def card_names(self) -> list[str]:
        """The cards of PyTorch, or else those of nvidia-smi."""
        return [card.name for card in self.devices or self.smi.cards]
