"""What a machine has, and what a model and its stores take of it."""
