#!/usr/bin/env python3
"""Prepare a training set from raw images: `python prepare_data.py --help`."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # PYTHONSAFEPATH leaves it out
from vae.commands import prepare as main  # noqa: F401
from vae.commands import run

if __name__ == "__main__":
    run("prepare")
