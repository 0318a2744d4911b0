"""The training loop for those who do not want to write it: evaluation, recovery, display."""
