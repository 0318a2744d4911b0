"""Prompts, and the user's code and values, as other processes get them."""
