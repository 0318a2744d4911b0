"""How many workers should train and generate: forecasts from what a run has measured."""
