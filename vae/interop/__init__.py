"""Reading and writing VAE files: checkpoints of training runs and formats of other programs."""
