"""Engines that turn token ids into token ids; each imports its own heavy package on first use."""
