"""Machines: the agent of each node, which starts, watches and ends workers."""
