"""The workers of one role on the nodes of a run: launch, liveness, restart, calls. Knows no RL."""
