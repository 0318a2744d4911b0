"""What became of every group of a run, and the journal that keeps it on the disk."""
