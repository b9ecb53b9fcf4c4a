"""Checkpoints on disk: their table of names, reading, writing, and a small one to play with."""
