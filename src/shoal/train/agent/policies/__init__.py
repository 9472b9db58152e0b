"""The networks of a run, and how their weights reach what samples."""
