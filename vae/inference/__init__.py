"""Using a finished VAE: encode, decode and reconstruct images of any size, whole or in tiles."""
