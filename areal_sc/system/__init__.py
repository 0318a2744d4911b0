"""What is asked of the operating system: files, locks, signals, processes, fork servers."""
