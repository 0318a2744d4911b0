"""Evaluations: in a run, of a model alone, and the best model that they find."""
