"""Validation while a run trains."""
