"""The verbs of prepare_data.py."""
