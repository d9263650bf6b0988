#!/usr/bin/env python3
"""Reconstruct, encode and decode images with a trained VAE: `python infer_vae.py --help`."""

from vae.config.infer_flags import parse_infer_flags
from vae.script import run_script


def main(argv: list[str]) -> int:
    """Flags to one call; returns the exit code."""
    config = parse_infer_flags(argv)
    from vae.inference.running import infer
    from vae.interop.vae_files import load_vae

    return infer(config, load_vae)


if __name__ == "__main__":
    run_script(
        "infer_vae.py", main, stopped="stopped: finished files are whole, the one at work is not there"
    )
