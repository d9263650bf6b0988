"""Checkpoints of a run."""
