"""The messages of one recording as tokens, each encoded once in each form it is needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.core.errors import DataError
from shoal.splitting.layout import ImageTokens, Layout, lay_out
from shoal.splitting.plans import Plan
from shoal.splitting.recordings import Message, Recording
from shoal.splitting.windows import Piece

Array = np.ndarray


class Encoder:
    """Encodes each message of a recording once, in each form it is needed."""

    def __init__(
        self, plan: Plan, recording: Recording, image_of: dict[str, int], tokens: Sequence[ImageTokens]
    ) -> None:
        self.template, self.rows, self.tokens = plan.template, plan.images.rows, tokens
        self.recording, self.image_of = recording, image_of
        self.joins = plan.template.concatenates and plan.template.joins(recording.messages)
        if not self.joins and not (plan.fixes.masks_from_messages and plan.fixes.assistant_header):
            raise DataError(
                "the chat template renders a message differently by its place, which the original cannot "
                "handle; use compat='fixed'"
            )
        self._known: dict[tuple[Piece, bool], Layout] = {}

    def as_context(self, piece: Piece, first: bool) -> Layout:
        """The whole message as the template writes it."""
        key = (piece._replace(turn=None), first)
        if key not in self._known:
            message = self.recording.messages[piece.message]
            text = self.template.message_text(message, piece.keep, first)
            if text is None:
                raise DataError(f"the chat template rewrites what stands before message {piece.message}")
            self._known[key] = self.lay_out(text, [piece])
        return self._known[key]

    def lay_out(self, text: str, pieces: Sequence[Piece]) -> Layout:
        """Tokens and positions of rendered text that shows the images of the pieces."""
        images = [
            self.image_of[place] for piece in pieces for place in places_of(self.recording.messages, piece)
        ]
        return self.text(self.template.encode(text), images)

    def text(self, ids: Array, images: Sequence[int] = ()) -> Layout:
        """Tokens and positions of encoded text."""
        image_token = self.template.image_token_id
        return lay_out(ids, image_token if image_token is not None else -1, images, self.tokens, self.rows)

    def plain(self, ids: Array) -> Layout:
        """Tokens and positions of encoded text in which no token stands for an image."""
        return lay_out(ids, -1, (), self.tokens, self.rows)


def places_of(messages: Sequence[Message], piece: Piece) -> list[str]:
    """Where the images are that a piece shows."""
    message = messages[piece.message]
    if not message.images:
        return []
    numbered = [index for index, part in enumerate(message.parts) if part["type"] == "image"]
    kept = range(len(message.parts)) if piece.keep is None else piece.keep
    return [message.images[numbered.index(index)] for index in kept if index in numbered]
