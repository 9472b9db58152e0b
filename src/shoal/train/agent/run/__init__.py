"""A run: playing its groups, its numbers, and what it leaves on disk."""
