"""Using a finished VAE: encode, decode and reconstruct pictures of any size, whole or in tiles."""
