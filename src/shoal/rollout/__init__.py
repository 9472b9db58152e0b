"""Agents meeting environments: engines, prompts, and the collection of trajectories."""
