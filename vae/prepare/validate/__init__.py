"""`--mode validate`: which files of a folder the trainer can read."""
