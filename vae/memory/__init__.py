"""What a step will need: counted by running the real step without data on the meta device."""
