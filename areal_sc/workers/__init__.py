"""Worker processes: entry point, train worker, rollout worker."""
