#!/usr/bin/env python3
"""Search for the settings of train_vae.py on your own images: `python tune_vae.py --help`."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # PYTHONSAFEPATH leaves it out
from vae.commands import run
from vae.commands import tune as main  # noqa: F401

if __name__ == "__main__":
    run("tune")
