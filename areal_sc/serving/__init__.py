"""The Tinker API, on the controllers of a run."""
