"""What a run recorded: its files read, two records compared, an episode replayed. Only run folders are read."""
