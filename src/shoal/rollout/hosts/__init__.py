"""Hosts of episodes: where envs are made, reset and stepped, and prompts are written."""
