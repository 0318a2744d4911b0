"""SGLang as a kind of server."""
