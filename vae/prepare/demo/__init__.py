"""`--mode demo`: synthetic images to try the trainer with."""
