"""Training on recordings: what others did and said is imitated, or weighed by its rewards."""
