"""What is found out about a machine, as plain data: gathering fills it in, judging only reads it.

Sizes are bytes and times seconds unless a name says otherwise; None means that it could not be found out.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PythonFacts:
    version: tuple[int, int, int]
    bits: int
    executable: str
    in_environment: bool  # a virtual environment of any kind
    project_python: str | None  # of the environment beside the scripts, where it is another one
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
    """What the files of the installed packages say before anything of them is loaded."""

    version: str | None = None  # with its build: 2.15.0+cu132
    cuda: str | None = None  # CUDA of the build: 13.2
    hip: str | None = None
    vision_version: str | None = None
    vision_wants_torch: str | None = None  # the specifier torchvision's own metadata states
    triton_version: str | None = None
    triton_name: str = "triton"  # triton-windows on Windows
    triton_wanted: str | None = None  # the specifier torch's own metadata states


@dataclass(frozen=True)
class CudaDevice:
    """A card as PyTorch sees it."""

    name: str
    capability: tuple[int, int]
    memory_total: int


@dataclass(frozen=True)
class KernelRun:
    """One computation run for real: how far it is from its reference, or why it did not run."""

    name: str
    seconds: float = 0.0
    difference: float | None = None  # relative, worst of the results and gradients compared
    tolerance: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class LoadedTorch:
    """What PyTorch says of itself once it is loaded, in a process of its own."""

    error: str | None = None  # why it cannot be loaded
    vision_error: str | None = None
    arch_list: tuple[str, ...] = ()
    cuda_available: bool = False
    cuda_message: str | None = None  # what it says where CUDA cannot be used
    devices: tuple[CudaDevice, ...] = ()
    kernels: tuple[KernelRun, ...] = ()
    unfinished: str | None = None  # what was running when the process ended by itself or by the time limit
    ended: str | None = None  # how it ended then


@dataclass(frozen=True)
class SmiCard:
    """A card as nvidia-smi reports it; sizes in MiB, power in W, as there."""

    index: int
    name: str
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    capability: tuple[int, int] | None = None
    pcie_generation: int | None = None
    pcie_generation_most: int | None = None
    pcie_width: int | None = None
    pcie_width_most: int | None = None
    power_draw: float | None = None
    power_limit: float | None = None
    power_default: float | None = None
    temperature_c: int | None = None
    clock_reasons: int | None = None  # NVML's bit mask of what holds the clocks back


@dataclass(frozen=True)
class Smi:
    """What nvidia-smi answered."""

    status: str  # answered, missing, hanging, failed
    message: str = ""
    driver: str | None = None
    cards: tuple[SmiCard, ...] = ()


@dataclass(frozen=True)
class Folder:
    """A folder that training reads or writes, or the nearest one above it that exists."""

    purpose: str
    flag: str
    path: str
    given: bool  # named on the command line
    exists: bool
    nearest: str
    free: int | None = None
    file_system: str | None = None
    problem: str | None = None  # why it cannot be read or written


@dataclass(frozen=True)
class WindowsFacts:
    long_paths: bool | None = None
    page_files: tuple[str, ...] | None = None  # lines of the registry's PagingFiles


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
    variables: dict[str, str] = field(default_factory=dict)  # of the environment, those that matter here
    windows: WindowsFacts | None = None


@dataclass(frozen=True)
class WeightsFile:
    path: str
    size: int | None  # None: not there


@dataclass(frozen=True)
class Facts:
    """All of it."""

    project: str
    quick: bool
    python: PythonFacts
    requirements: tuple[Requirement, ...]
    torch_files: TorchFiles
    loaded: LoadedTorch | None  # None: torch is not installed
    smi: Smi
    host: HostFacts
    folders: tuple[Folder, ...]
    vgg: WeightsFile
