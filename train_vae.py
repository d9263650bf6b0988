#!/usr/bin/env python3
"""Train a high-resolution image VAE on a folder of images: `python train_vae.py --help`."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # PYTHONSAFEPATH leaves it out
from vae.commands import run
from vae.commands import train as main  # noqa: F401

if __name__ == "__main__":
    run("train")
