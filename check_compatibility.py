#!/usr/bin/env python3
"""Check this machine: prints what works, what does not, and the remedy for each problem."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # PYTHONSAFEPATH leaves it out
from vae.commands import check as main  # noqa: F401
from vae.commands import run

if __name__ == "__main__":
    run("check")
