"""The order of images as a function of (seed, epoch, step)."""
