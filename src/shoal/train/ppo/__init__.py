"""PPO on parallel environments: one policy, many copies of an environment, the same bytes every time."""
