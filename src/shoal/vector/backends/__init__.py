"""Backends beside processes and threads: Ray actors, and batches that environments bring along."""
