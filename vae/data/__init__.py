"""Training crops: their loading by decoding processes, sizes, augmentation and manifest."""
