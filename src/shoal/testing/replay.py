"""`Replay` and `find_episode` of `shoal.train.records.replay`, for tests that play a recorded episode again."""

from shoal.train.records.replay import Replay, find_episode

__all__ = ["Replay", "find_episode"]
