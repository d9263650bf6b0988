"""The options of check_compatibility.py, each declared once."""

from dataclasses import dataclass

from vae.config.errors import UsageError
from vae.config.flags import parse_section
from vae.config.options import Config, option

DESCRIPTION = """\
Looks at this machine and judges whether the VAE trainer can run here, and how well: Python and its
packages, the build of PyTorch, the card and its driver, the system, memory and disks. The computations
that training stands on are run for real, on the card where there is one, and compared with a reference.

Each check ends as ok, WARN, FAIL or skip. A WARN or FAIL says what was found, what was expected, and the
line that mends it. Nothing is changed on the machine, and nothing is sent anywhere."""

EPILOG = """\
examples:
  python check_compatibility.py                  everything; about half a minute
  python check_compatibility.py --quick          without compiling anything; a few seconds
  python check_compatibility.py --json > report.json    for programs, or to attach to a question
  python check_compatibility.py --plan           which profiles fit this card, and how they run on it
  python check_compatibility.py --plan --gpu "RTX 5090"      the same for a card that is not here
  python check_compatibility.py --plan --vram_gib 12         the same for any card of 12 GiB

exit code:
  0  fine; there may be warnings        2  the command line cannot be read
  1  something failed                   3  with --strict: there are warnings
  78 --plan: there is no such card"""


@dataclass(frozen=True)
class CheckConfig:
    """What is looked at, and how it is told."""

    quick: bool = option(False, "leave out torch.compile and do not wait for a slow driver")
    json: bool = option(False, "print one JSON object and nothing else")
    strict: bool = option(False, "exit with 3 where there are warnings")
    output_dir: str = option(
        Config().run.output_dir,
        "folder the runs will be written to: is it writable, local, large enough",
        metavar="DIR",
    )
    data_path: str | None = option(
        None,
        "folder of the training images: can it be read, is it local; left out: "
        f"{Config().data.data_path}, if it is there",
        metavar="DIR",
    )
    plan: bool = option(False, "instead of the checks: print each profile with its predicted memory")
    gpu: str | None = option(None, "plan for this card; left out: for the one that is here", metavar="NAME")
    vram_gib: float | None = option(
        None, "plan for a card with this much memory, as it is sold", metavar="GIB"
    )


def parse_check_flags(argv: list[str]) -> CheckConfig:
    """The options of one command; UsageError where one of them says nothing about the others."""
    config = parse_section(CheckConfig, "check_compatibility.py", DESCRIPTION, EPILOG, argv)
    for name in ("gpu", "vram_gib"):
        if getattr(config, name) is not None and not config.plan:
            raise UsageError(f"--{name} says what --plan is for: add --plan")
    for name in ("quick", "strict"):
        if getattr(config, name) and config.plan:
            raise UsageError(
                f"--{name} is for the checks, which --plan takes the place of: leave one of them out"
            )
    return config
