"""Pure functions of reinforcement learning: packing, advantages, log-probabilities, losses."""
