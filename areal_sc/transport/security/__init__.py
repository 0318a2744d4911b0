"""The keys of a run, and who is let in by them."""
