"""Runs a command on the null GPU: `python -m tests.null_gpu [--gib 30.3] python train_vae.py ...`."""

import argparse
import os
import sys

from tests.null_gpu.build import environment, why_not


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.null_gpu", description=__doc__)
    parser.add_argument("--gib", type=float, help="memory of the card (default: what PyTorch sees of it)")
    parser.add_argument(
        "--sm", type=int, choices=(75, 90, 120), help="120: RTX 5090 (default); 90: H100; 75: 2080 Ti"
    )
    parser.add_argument("--workspaces_mib", help="workspaces of cuDNN's plans, the fastest first: 256,0")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if not given.command:
        parser.error("the command is missing, such as: python train_vae.py --help")
    if reason := why_not():
        sys.exit(reason)
    child = environment(given.gib, given.sm, given.workspaces_mib)
    os.execvpe(given.command[0], given.command, child)


if __name__ == "__main__":
    main()
