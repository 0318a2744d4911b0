"""The rollout side: admission under the staleness bound, groups, batches, workers."""
