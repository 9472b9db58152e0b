"""A graph of dependent skills trained in parallel, each an expert network."""
