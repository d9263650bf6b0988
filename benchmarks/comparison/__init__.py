"""Ours beside diffusers' AutoencoderKL and its trainer's step: the same work on both sides, one process."""
