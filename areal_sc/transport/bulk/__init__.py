"""Chunks of sealed shards over sockets of their own: sessions, tags, credits."""
