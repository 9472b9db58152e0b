"""Several processes as one run, and arithmetic that gives the same bits."""
