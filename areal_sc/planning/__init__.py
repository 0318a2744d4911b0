"""How many workers should train and generate: arithmetic on the times that a run has measured."""
