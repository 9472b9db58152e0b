"""Learning skills: the first client of the job graph."""
