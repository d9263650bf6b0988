"""Judges the facts, one file per subject; `all_checks.judge` combines them."""
