"""Holds what a server of SGLang imports: on its path, this folder gives it one module."""
