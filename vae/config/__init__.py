"""Every option, once: declarations, recipes, and how flags, JSON, checkpoint and profile become one Config.

Needs only the standard library, so `--help` answers before PyTorch is installed.
"""
