"""The memory of a step: planned for a stage, and what a step does if it runs out."""
