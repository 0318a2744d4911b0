"""Files of the script's machine on nodes that share no folder with it, and the way back."""
