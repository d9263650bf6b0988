#!/usr/bin/env python3
"""Reconstruct, encode and decode images with a trained VAE: `python infer_vae.py --help`."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # PYTHONSAFEPATH leaves it out
from vae.commands import infer as main  # noqa: F401
from vae.commands import run

if __name__ == "__main__":
    run("infer")
