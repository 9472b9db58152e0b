"""A resumable graph of skills: its rows, what follows from them, where trainings run, and nothing of how they learn."""
