"""Runs over the folds of a split."""
