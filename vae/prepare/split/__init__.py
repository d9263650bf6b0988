"""`--mode split`: training and validation sides for the images of a manifest."""
