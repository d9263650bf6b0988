"""The options of check_compatibility.py, each declared once."""

from dataclasses import dataclass

from vae.config.declare import option
from vae.config.flags import parse_section
from vae.config.options import Config
from vae.system.errors import UsageError

DESCRIPTION = """\
Checks whether the VAE trainer can run on this machine, and how well: the packages of Python, the build of
PyTorch, the card and its driver, memory, disks and the weights of LPIPS.

The result of each check is ok, WARN, FAIL or skip. A WARN or FAIL prints what was found, what was expected,
and the remedy. The script changes nothing on the machine and sends nothing anywhere."""

EPILOG = """\
examples:
  python check_compatibility.py                  all checks; some seconds
  python check_compatibility.py --json > report.json    for programs, or to attach to a bug report
  python check_compatibility.py --plan           the profiles that fit this card, with predicted memory
  python check_compatibility.py --plan --gpu "RTX 5090"      the same for another card
  python check_compatibility.py --plan --vram_gib 12         the same for any card with 12 GiB
  python train_vae.py --plan --gpu "RTX 5090" --image_size 2048    the same for flags of your own

exit code:
  0  nothing failed; warnings are allowed    2  the command line is invalid
  1  a check failed                          3  warnings, with --strict
  78 --plan: unknown card"""


@dataclass(frozen=True)
class CheckConfig:
    """The checks to run, and the form of their report."""

    json: bool = option(False, "print one JSON object and nothing else")
    strict: bool = option(False, "exit with code 3 if there are warnings")
    output_dir: str = option(
        Config().run.output_dir,
        "folder for the runs: checks that it is writable, local and large enough",
        metavar="DIR",
        writes=True,
    )
    data_path: str | None = option(
        None,
        "folder of the training images: checks that it is readable and local; without this flag: "
        f"{Config().data.data_path[0]}, if it exists",
        metavar="DIR",
    )
    plan: bool = option(False, "print each profile with its predicted memory, instead of the checks")
    gpu: str | None = option(
        None, "plan for this card; without this flag: for the card of this machine", metavar="NAME"
    )
    vram_gib: float | None = option(
        None, "plan for a card with this memory size, as advertised", metavar="GIB"
    )


def parse_check_flags(argv: list[str]) -> CheckConfig:
    """The options of one command; raises UsageError for options that cannot be combined."""
    config = parse_section(CheckConfig, "check_compatibility.py", DESCRIPTION, EPILOG, argv)
    for name in ("gpu", "vram_gib"):
        if getattr(config, name) is not None and not config.plan:
            raise UsageError(f"--{name} is only used by --plan: add --plan")
    if config.strict and config.plan:
        raise UsageError("--strict is only used by the checks, which --plan replaces: remove one of them")
    return config
