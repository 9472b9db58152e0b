"""What a worker is given and what it gives back: a plan for all trajectories, a job for one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.splitting.fixes import Fixes
from shoal.splitting.images import ImageReader, Pixels
from shoal.splitting.layout import Truncation
from shoal.splitting.pixels import Store
from shoal.splitting.recordings import Reader
from shoal.splitting.samples import RewardPlacement, Sample
from shoal.splitting.templates import ChatTemplate
from shoal.splitting.windows import Limits

Kind = Literal["stepwise", "window", "last-n"]


@dataclass(frozen=True)
class Plan:
    """All that turns a recording into samples; made once, sent to each worker once."""

    kind: Kind
    reader: Reader
    template: ChatTemplate
    images: ImageReader
    limits: Limits
    fixes: Fixes
    max_prompt_length: int
    max_response_length: int
    truncation: Truncation
    reward: RewardPlacement
    use_rollout: bool


@dataclass(frozen=True, slots=True)
class Job:
    """One trajectory to split."""

    index: int
    dataset_id: str
    path: Path | None = None
    reward: float | None = None  # None: as recorded, or 0
    scores: tuple[float, ...] = ()  # one per turn, -1 for none
    first_turn: int = 0  # earlier turns are not trained
    store: Store = "u8"


@dataclass(slots=True)
class SplitTrajectory:
    """What comes back from a worker."""

    index: int
    dataset_id: str
    samples: list[Sample]
    pixels: Pixels
    n_images: int
