"""Conversations and pairs of answers, as tokens to train on."""
