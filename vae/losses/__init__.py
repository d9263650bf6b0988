"""The terms of the training loss: pure functions of tensors, one value per image."""
