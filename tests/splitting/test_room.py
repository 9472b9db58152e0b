"""The room itself: what a long recording costs."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from chats import talk
from PIL import Image

from shoal.splitting import ChatReader, StepwiseTrajectorySplitter, TrajectorySplitter

ROOM = Path(__file__).parents[2] / "src" / "shoal" / "splitting"


class Work:
    """Lines of the room that run, and what is rendered and encoded."""

    def __init__(self):
        self.lines = 0

    def __call__(self, frame, event, arg):
        if str(ROOM) not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.lines += 1
        return self


@pytest.mark.parametrize("cls", [StepwiseTrajectorySplitter, TrajectorySplitter])
def test_the_work_for_a_recording_grows_with_its_length_and_no_faster(processor, tmp_path, cls, monkeypatch):
    Image.new("RGB", (28, 28)).save(tmp_path / "a.png")
    work, letters = {}, Counter()
    tokenizer = processor.tokenizer
    encode = type(tokenizer).encode

    def counted(self, text, **options):
        letters[size] += len(text)
        return encode(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "encode", counted)
    for size in (100, 200, 400):
        shown = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Go."}]
        chat = talk("I go.", shown) * (size // 2)
        (tmp_path / f"{size}.json").write_text(json.dumps([chat]))
        reader = ChatReader(tmp_path / f"{size}.json")
        splitter = cls(processor, tmp_path, reader=reader, limit_messages=3, padding="longest")
        [name] = reader.ids()
        letters[size] = 0
        counter = Work()
        sys.settrace(counter)
        try:
            found = next(splitter.results([name]))
        finally:
            sys.settrace(None)
        assert len(found.samples) == (size // 2 if cls is StepwiseTrajectorySplitter else size // 10)
        work[size] = counter.lines
    assert work[400] - work[200] <= 2.05 * (work[200] - work[100])
    assert letters[400] <= 2.05 * letters[200]
