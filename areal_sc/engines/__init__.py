"""The parallel computation that a worker hosts, and the torch-free handles that stand for it."""
