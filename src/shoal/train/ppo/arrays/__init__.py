"""Experience of array policies over vector envs."""
