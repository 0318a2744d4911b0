"""The folder of one run: its files, its owner, its histories, and what it says of itself."""
