"""Episodes: the protocol, shipped workflows, and rewards in killable processes."""
