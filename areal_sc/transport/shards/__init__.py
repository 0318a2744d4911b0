"""Sealed tensors: where they lie, who owns them, and how workers of a node share their memory."""
