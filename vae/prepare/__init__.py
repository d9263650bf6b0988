"""The modes of prepare_data.py: blocks of images become rows, which are selected from and published."""
