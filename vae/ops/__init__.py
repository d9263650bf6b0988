"""The few operations that decide speed and memory: a readable form of each, a fast path beside it.

Shapes: B images, C channels, H x W pixels, N = H*W tokens.
"""
