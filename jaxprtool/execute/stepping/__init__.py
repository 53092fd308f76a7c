"""Shared parts of stepping interpreters: frames, iterations, shards."""
