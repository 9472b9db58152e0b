"""Many environments at once, in this process or in workers, with the same results."""
