"""What runs a program step by step shares: frames, iterations, shards, effects, and places."""
