"""Starting, watching and stopping worker processes."""
