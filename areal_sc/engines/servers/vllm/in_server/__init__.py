"""Holds what vLLM's own processes import: on their path, this folder gives them one package."""
