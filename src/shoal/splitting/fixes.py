"""The oddities of the original splitter, each one a switch: off reproduces it, on is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.core.errors import ConfigError, did_you_mean

Compat = Literal["fixed", "seed"]


@dataclass(frozen=True, slots=True)
class Fixes:
    """What is done right (`True`, `compat="fixed"`) or as the original does it (`False`, `compat="seed"`)."""

    assistant_header: bool = True
    """The header that opens the model's turn ends the prompt, as at rollout time. Off: stepwise samples have
    no header at all and windows carry it in the response."""
    keep_last_step: bool = True
    """Stepwise: a recording that ends on the model's message trains that message too. Off: it is dropped."""
    single_newline: bool = True
    """Windows: the newline after the first screenshot stands once. Off: at the end of the prompt and again at
    the start of the response, with the same position. `assistant_header` implies it."""
    reward_on_loss_token: bool = True
    """The reward sits on the last token that is trained. Off: on the last token of the response, which in
    windows is an untrained newline."""
    masks_from_messages: bool = True
    """What is trained follows from the messages: the text of the sample's own assistant turns and the token
    that ends them. Off: found by searching header and end tokens (windows) or the first end token (steps)."""
    response_limit: bool = True
    """Windows: prompt and response have a limit each. Off: both together must fit `max_prompt_length`."""
    drop_images_with_tokens: bool = True
    """Truncation removes an image whole, tokens and pixels. Off: a sample that would lose image tokens is an
    error (the original went on with pixels that no token stands for)."""
    trim_tail: bool = True
    """Windows end at their last trained token, and a window without any is not made. Off: a trailing
    screenshot or newline stays, and a lone trailing screenshot becomes a window with nothing to learn."""
    exact_response_text: bool = True
    """Stepwise: the model's text is kept as recorded. Off: white space around it is stripped, and the default
    system prompt or an assistant header inside it disappear."""
    escape_control_tokens: bool = True
    """Control tokens that are written out in recorded text are encoded as plain text. Off: they become real
    control tokens and can forge roles, images and masks."""
    text_instruction: bool = True
    """Where the instruction is repeated it keeps its text parts, whatever their order. Off: it keeps its
    first part; in windows only once a window began with a message of a single part."""
    limit_images_in_windows: bool = True
    """Windows respect `limit_images` by dropping their oldest images. Off: they ignore it."""
    last_n_turns: bool = True
    """`LastNTrajectorySplitter` takes the last `window_size` turns. Off: whatever the last window of the
    stride grid holds, which can be a single turn."""

    @staticmethod
    def resolve(compat: Compat, overrides: Mapping[str, bool] | Fixes | None = None) -> Fixes:
        """All switches on for "fixed", off for "seed", then the named ones as given."""
        if isinstance(overrides, Fixes):
            return overrides
        if compat not in ("fixed", "seed"):
            raise ConfigError(f"compat must be 'fixed' or 'seed', got {compat!r}")
        names = [field.name for field in dataclasses.fields(Fixes)]
        for name, value in (overrides or {}).items():
            if name not in names:
                raise ConfigError(f"no fix named {name!r}.{did_you_mean(name, names)}")
            if not isinstance(value, bool):
                raise ConfigError(f"fix {name!r} must be True or False, got {value!r}")
        return Fixes(**{name: compat == "fixed" for name in names} | dict(overrides or {}))
