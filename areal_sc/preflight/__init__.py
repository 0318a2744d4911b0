"""What is found out about a run before a worker is started: wrong settings, placement, memory."""
