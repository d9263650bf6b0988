"""Every option: its declaration, its command line, and how one Config is made from all sources.

The order of sources is flag, JSON file, checkpoint, profile, card, default. This package needs only the
standard library, so `--help` works before PyTorch is installed.
"""
