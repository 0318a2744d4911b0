"""Nodes from SLURM: its commands, the job, and the agents that join from there."""
