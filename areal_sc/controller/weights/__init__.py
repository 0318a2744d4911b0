"""How rollout workers get the newest weights: who pulls from whom, and when."""
