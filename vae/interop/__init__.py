"""Reading and writing VAE files: the checkpoints of a run, and other programs' formats."""
