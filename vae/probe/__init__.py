"""The latent probe: classifiers on latents show what a frozen VAE's latents still know about an image."""
