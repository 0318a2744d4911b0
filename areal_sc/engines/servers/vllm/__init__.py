"""vLLM as a kind of server."""
