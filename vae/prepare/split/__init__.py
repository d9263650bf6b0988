"""`--mode split`: training and validation subsets for the images of a manifest."""
