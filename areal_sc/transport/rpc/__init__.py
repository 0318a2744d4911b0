"""Calls between controllers and workers: requests, replies, deadlines, fan-out."""
