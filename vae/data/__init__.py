"""Images: from a folder of image files to uint8 batches in a resumable order."""
