"""Other people's environments as text environments, one file each; each imports its library on first use."""
