"""Real steps that are not part of a run: they measure something, and all that they change is restored."""
