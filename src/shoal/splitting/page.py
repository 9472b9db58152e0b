"""One sample as a web page: who speaks, what is trained, which images it shows, where the reward sits.

A page of its own, without scripts or anything from elsewhere; recorded text is escaped.
"""

from __future__ import annotations

import html
import re
from typing import Any, Literal

import numpy as np

from shoal.splitting.batch import Batch, Sample
from shoal.splitting.images import TrajectoryPixels, thumbnail_url

Scale = Literal["auto", "pixels", "parts", "thousandths"]
THUMBNAIL = 420
POINT = re.compile(
    r"(?:click|tap|double|move|drag|press|point|coordinate|start_box)[^\n]{0,60}?[(\[=:]\s*(?:x\s*=\s*)?"
    r"(-?\d{1,5}(?:\.\d{1,6})?)\s*,\s*(?:y\s*=\s*)?(-?\d{1,5}(?:\.\d{1,6})?)",
    re.IGNORECASE,
)
"""Where an answer says a point: `click(point='(12,30)')`, `click(x=0.1, y=0.2)`, `"coordinate": [1, 2]`."""
STYLE = """
body{font:14px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.3em} .facts{color:#555} .key span{padding:.1em .5em;margin-right:.6em;border-radius:3px}
.turn{border-left:4px solid #bbb;margin:.5em 0;padding:.2em .8em;background:#f7f7f7;overflow-wrap:anywhere}
.turn b{display:block;font-size:.8em;color:#666} 
.text{white-space:pre-wrap;font-family:ui-monospace,monospace}
.system{border-color:#999} .user{border-color:#4a7fc1} .assistant{border-color:#c18a2b}
.border{border-top:2px dashed #a33;color:#a33;font-size:.85em;margin:1em 0}
.trained{background:#c9efc9} .masked{color:#777}
.reward{background:#ffd24d;outline:2px solid #c80;font-weight:600}
img{max-width:420px;display:block;margin:.4em 0;border:1px solid #ccc}
"""


def sample_page(batch: Batch, index: int, tokenizer: Any, *, scale: Scale = "auto") -> str:
    """The page of sample `index` as HTML text.

    Args:
        batch: where the sample is.
        index: its row; negative counts from the end.
        tokenizer: turns its ids back into text.
        scale: of the points that answers say: pixels of the recorded screen, parts of 1, thousandths; "auto" takes
            fractions for parts of 1 and all else for pixels.
    """
    samples = batch.samples()
    if not -len(samples) <= index < len(samples):
        raise ValueError(f"sample must be in [0, {len(samples) - 1}], got {index}")
    sample = samples[index]
    rewards = np.flatnonzero(sample.rewards)
    facts = [
        f"task {sample.uid}",
        f"sample {sample.step_index + 1} of {sample.n_steps}",
        f"{len(sample.prompt_ids):,} prompt tokens",
        f"{len(sample.response_ids):,} response tokens, {int(sample.response_mask.sum()):,} trained",
        f"{len(sample.images)} images",
        f"reward {sample.rewards.sum():g} on "
        + (f"response token {', '.join(map(str, rewards.tolist()[:8]))}" if len(rewards) else "no token"),
    ]
    body = "\n".join(_stretches(sample, tokenizer, _thumbnails(sample, scale)))
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        f"<title>{html.escape(sample.dataset_id)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(sample.dataset_id)}</h1>"
        f"<p class='facts'>{html.escape(' · '.join(facts))}</p>"
        "<p class='key'><span class='masked'>read, not trained</span><span class='trained'>trained</span>"
        f"<span class='reward'>reward</span></p>\n{body}\n</html>\n"
    )


def _stretches(sample: Sample, tokenizer: Any, thumbnails: list[str]) -> list[str]:
    """One block per message part, with a line where the response begins."""
    border = len(sample.prompt_ids)
    styles = np.array(
        ["masked"] * border + ["trained" if each else "masked" for each in sample.response_mask]
    )
    styles[border:][sample.rewards != 0] = "reward"
    shown = zip(sample.image_spans, thumbnails, strict=True)
    images = {first: (n, last, url) for n, ((_, first, last), url) in enumerate(shown, 1)}
    blocks = []
    for role, first, last in sample.roles:
        if first == last:
            continue
        if first == border:
            blocks.append("<div class='border'>response</div>")
        text, at = "", first
        while at < last:
            if at in images:
                number, stop, url = images[at]
                text += f"<img alt='image {number}' src='{url}'>({stop - at:,} image tokens)"
            else:
                stop = at + 1
                while stop < last and stop not in images and styles[stop] == styles[at]:
                    stop += 1
                said = tokenizer.decode(sample.input_ids[at:stop].tolist())
                text += f"<span class='{styles[at]}'>{html.escape(said)}</span>"
            at = stop
        kind = role if role in ("system", "user", "assistant") else "other"
        blocks.append(
            f"<div class='turn {kind}'><b>{html.escape(role)}</b><div class='text'>{text}</div></div>"
        )
    return blocks


def _thumbnails(sample: Sample, scale: Scale) -> list[str]:
    """Small pictures as data URLs, made from the pixels the model gets, with the point that the next answer says."""
    if not (sample.inputs and isinstance(sample.inputs.pixels, TrajectoryPixels)):
        return ["" for _ in sample.images]
    from PIL import Image

    pixels = sample.inputs.pixels
    urls = []
    for image, point in zip(sample.images, _points(sample), strict=True):
        picture = Image.fromarray(pixels.picture(image))
        at = None if point is None else _on_picture(point, picture.size, pixels.sizes.get(image), scale)
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
        if at is not None:
            _draw_click(picture, at[0] * picture.size[0], at[1] * picture.size[1])
        urls.append(thumbnail_url(picture))
    return urls


def _points(sample: Sample) -> list[tuple[float, float] | None]:
    """For each image that a sample shows, the point of the first answer behind it, if no other image comes between.

    None where truncation took images: the messages do not say which.
    """
    points: list[tuple[float, float] | None] = []
    waiting = 0  # images since the last answer
    for message in sample.messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message["role"] != "assistant":
            shown = sum(part["type"] == "image" for part in parts)
            waiting += shown
            points += [None] * shown
            continue
        said = "".join(part.get("text", "") for part in parts)
        found = POINT.search(re.sub(r"<\|[a-z_]+\|>", "", said))
        if found and waiting:
            points[-1] = (float(found[1]), float(found[2]))
        waiting = 0
    return points if len(points) == len(sample.images) else [None] * len(sample.images)


def _on_picture(
    point: tuple[float, float], size: tuple[int, int], recorded: tuple[int, int] | None, scale: Scale
) -> tuple[float, float] | None:
    """Where a point is as parts of the picture, or None where it is outside of it."""
    if scale == "auto":
        scale = "parts" if max(point) <= 1 and (point[0] % 1 or point[1] % 1) else "pixels"
    width, height = {"parts": (1, 1), "thousandths": (1000, 1000), "pixels": recorded or size}[scale]
    x, y = point[0] / width, point[1] / height
    return (x, y) if 0 <= x <= 1 and 0 <= y <= 1 else None


def _draw_click(picture: Any, x: float, y: float) -> None:
    from PIL import ImageDraw

    pen = ImageDraw.Draw(picture)
    for radius, colour in ((11, "white"), (9, "#e6194b")):
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], outline=colour, width=3)
    pen.line([x - 16, y, x + 16, y], fill="#e6194b", width=1)
    pen.line([x, y - 16, x, y + 16], fill="#e6194b", width=1)
