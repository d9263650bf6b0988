"""Datasets of shards: their index, and their images from a folder, a cache or a remote store."""
