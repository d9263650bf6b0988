"""The memory that a step needs: counted by running the real step without data on the meta device."""
