"""Rollouts on parallel workers that share one sampler."""
