"""The exact commands that fix a problem, as the user types them on this system."""

import shlex

from vae.checks import cuda_builds
from vae.checks.facts import Facts


def setup(facts: Facts, build: str | None = None) -> str:
    """The set-up script, with `--torch` if another build is needed."""
    script = "setup_windows.bat" if facts.on_windows else "./setup.sh"
    return f"{script} --torch {build}" if build else script


def pip(facts: Facts, *words: str) -> str:
    """A pip command of the Python that runs now, quoted for the shell."""
    command = (facts.python or "python", "-m", "pip", *words)
    if facts.on_windows:
        return " ".join(f'"{word}"' if set(word) & set(" <>=&") else word for word in command)
    return shlex.join(command)


def same_pair(facts: Facts) -> str:
    """Reinstall torch and torchvision, both from the index of one build."""
    tag = (facts.torch_files.version or "").partition("+")[2] or suggested(facts) or "cpu"
    index = f"https://download.pytorch.org/whl/{tag}"
    return pip(facts, "install", "--force-reinstall", "torch", "torchvision", "--index-url", index)


def suggested(facts: Facts) -> str | None:
    """The build that the set-up installs here by default; None if the driver must be updated first."""
    branch = cuda_builds.driver_branch(facts.smi.driver) if facts.smi.driver else None
    newest = max((card.capability for card in facts.cards if card.capability), default=None)
    if branch is None and facts.loaded.devices:
        # No nvidia-smi, as in some containers: the driver is at least what the installed build needs.
        branch = cuda_builds.needed_branch(facts.torch_files.cuda, newest)
    return cuda_builds.suggested_build(branch, newest)


def suitable_build(facts: Facts) -> str:
    """Install the build that suits card and driver, or update the driver if that must come first."""
    build = suggested(facts)
    return setup(facts, build) if build else update_driver(facts)


def update_driver(facts: Facts, branch: int = cuda_builds.NEWEST_DRIVER) -> str:
    """How to install a driver of at least `branch`."""
    if facts.on_windows or facts.host.wsl:
        where = "in Windows, " if facts.host.wsl else ""
        return f"{where}install driver {branch} or newer from https://www.nvidia.com/drivers, then restart"
    return f"install driver {branch} or newer, then restart (Ubuntu: sudo ubuntu-drivers install)"


def compiler(facts: Facts) -> str:
    """The command that installs a C and C++ compiler."""
    if facts.on_windows:
        return "winget install Microsoft.VisualStudio.2022.BuildTools"
    return "xcode-select --install" if facts.host.system == "Darwin" else "sudo apt install gcc g++"


def of_error(facts: Facts, error: str) -> str:
    """The remedy for an error message of CUDA or the compiler."""
    if "no kernel image" in error or "not compatible with the current PyTorch" in error:
        return suitable_build(facts)
    if "out of memory" in error.lower():
        return "end the processes that use the card's memory and that you do not need: nvidia-smi lists them"
    return compiler(facts) if "compiler" in error.lower() else same_pair(facts)


def show_cards(facts: Facts, numbers: str = "") -> str:
    """The command that makes PyTorch use the cards with these numbers, or every card."""
    if facts.on_windows:
        return f"set CUDA_VISIBLE_DEVICES={numbers}"
    return f"export CUDA_VISIBLE_DEVICES={numbers}" if numbers else "unset CUDA_VISIBLE_DEVICES"
