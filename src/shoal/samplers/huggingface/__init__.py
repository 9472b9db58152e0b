"""Models of `transformers` in this process: rows on CPUs, slots on GPUs."""
