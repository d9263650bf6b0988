#!/usr/bin/env python3
"""Measure and compare VAEs on a folder of images: `python evaluate_vae.py --help`."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # PYTHONSAFEPATH leaves it out
from vae.commands import evaluate as main  # noqa: F401
from vae.commands import run

if __name__ == "__main__":
    run("evaluate")
