"""Recorded multimodal trajectories cut into training batches."""
