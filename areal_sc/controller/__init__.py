"""Controllers: they decide, and move metadata; they never hold a tensor."""
