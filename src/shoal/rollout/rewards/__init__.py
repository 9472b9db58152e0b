"""Rewards that score groups of episodes after they were played: functions, programs, models that judge."""
