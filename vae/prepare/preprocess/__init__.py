"""`--mode preprocess`: raw image files to a training set."""
