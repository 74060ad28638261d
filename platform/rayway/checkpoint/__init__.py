"""Checkpoints: when to save, what a save is made of, and the commit that makes it exist."""
