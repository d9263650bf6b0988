"""`--probe_profile`: a large classifier on the latents of a frozen VAE, by a whole recipe."""
