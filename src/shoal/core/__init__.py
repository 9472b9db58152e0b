"""Records, errors, seeds, executors, names and files: what every room stands on (numpy only)."""
