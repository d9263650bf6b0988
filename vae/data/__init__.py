"""Images: from a folder of files to uint8 batches in an order that can be resumed."""
