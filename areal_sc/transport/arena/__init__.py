"""The shared memory of a node: who writes there, who maps it, and when it is used again."""
