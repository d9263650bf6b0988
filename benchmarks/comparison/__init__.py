"""Comparison with diffusers' AutoencoderKL and its trainer's step, on the same work in one process."""
