"""The modes of prepare_data.py, one folder each, over shared files."""
