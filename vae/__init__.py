"""The toolkit's package: everything that the scripts beside it call."""
