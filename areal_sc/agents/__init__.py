"""Agents that know nothing of training: they call a URL, and what was sampled there is trained."""
