"""Encode, decode and reconstruct images of any size with a trained VAE, whole or in tiles."""
