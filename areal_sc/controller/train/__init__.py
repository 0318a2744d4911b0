"""The training side: steps, the ranks of a model through all their lives, publication."""
