"""Rewards: what a function of the user's says of a completion, in processes that can be killed."""
