"""The command line of check_compatibility.py."""

import argparse

from vae.config.errors import EXIT_USAGE
from vae.config.options import Config

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


class _Parser(argparse.ArgumentParser):
    """Says a mistake in one line."""

    def error(self, message: str):
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (--help lists the flags)\n")


def read_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; exits with 2 and one line where it cannot be read."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    _check(arguments, parser)
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """The flags and their help."""
    defaults = Config()
    parser = _Parser(
        prog="check_compatibility.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        usage="%(prog)s [flags]",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="leave out torch.compile and do not wait for a slow driver"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--strict", action="store_true", help="exit with 3 where there are warnings")
    parser.add_argument(
        "--output_dir",
        default=defaults.run.output_dir,
        metavar="DIR",
        help="folder the runs will be written to: is it writable, local, large enough (%(default)s)",
    )
    parser.add_argument(
        "--data_path",
        metavar="DIR",
        help=f"folder of the training pictures: can it be read, is it local ({defaults.data.data_path}, if "
        "it is there)",
    )
    plan = parser.add_argument_group("what fits, instead of the checks")
    plan.add_argument("--plan", action="store_true", help="print each profile with its predicted memory")
    plan.add_argument(
        "--gpu", metavar="NAME", help="plan for this card; without it, for the one that is here"
    )
    plan.add_argument(
        "--vram_gib", type=float, metavar="GIB", help="plan for a card with this much memory, as it is sold"
    )
    return parser


def _check(arguments: argparse.Namespace, parser: _Parser) -> None:
    for name in ("gpu", "vram_gib"):
        if getattr(arguments, name) is not None and not arguments.plan:
            parser.error(f"--{name} says what --plan is for: add --plan")
    for name in ("quick", "strict"):
        if getattr(arguments, name) and arguments.plan:
            parser.error(
                f"--{name} is for the checks, which --plan takes the place of: leave one of them out"
            )
