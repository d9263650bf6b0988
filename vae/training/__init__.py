"""A run: from given options to checkpoints, through stages, steps, validation and signals."""
