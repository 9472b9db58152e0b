"""A resumable graph of jobs whose results are kept as versions; nothing here knows what the jobs do."""
