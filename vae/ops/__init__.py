"""The operations that decide speed and memory: each has a readable reference and a fast path.

Shapes: B images, C channels, H x W pixels, N = H*W tokens.
"""
