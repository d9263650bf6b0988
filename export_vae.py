#!/usr/bin/env python3
"""Write a trained VAE for other programs: `python export_vae.py --help`."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # PYTHONSAFEPATH leaves it out
from vae.commands import export as main  # noqa: F401
from vae.commands import run

if __name__ == "__main__":
    run("export")
