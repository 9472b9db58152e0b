"""The room itself: which files a sample enters, and what a long recording costs."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from shoal.splitting import ChatReader, StepwiseTrajectorySplitter, TrajectorySplitter
from shoal.splitting.batch import Sample

ROOM = Path(__file__).parents[2] / "src" / "shoal" / "splitting"


class Files:
    """Files of shoal in which a function is called."""

    def __init__(self):
        self.found = set()

    def __call__(self, frame, event, arg):
        place = Path(frame.f_code.co_filename)
        if event == "call" and place.is_relative_to(ROOM.parent):
            self.found.add(place.relative_to(ROOM.parent).as_posix())


@pytest.mark.parametrize("cls", [StepwiseTrajectorySplitter, TrajectorySplitter])
def test_a_further_sample_of_a_recording_enters_at_most_six_files(processor, make_root, cls, monkeypatch):
    """What is done once for a recording (reading it, its pixels) is not done for each of its samples."""
    root, ids = make_root(1, steps=6, size=(60, 60))
    splitter = cls(processor, root, 2, 1, padding="longest")
    splitter.split(ids)
    files, made = Files(), Sample.__init__

    def begun(self, *values, **fields):
        made(self, *values, **fields)
        sys.setprofile(files)  # from the first sample to the last

    monkeypatch.setattr(Sample, "__init__", begun)
    results = splitter.results(ids)
    try:
        found = next(results)
    finally:
        sys.setprofile(None)
    monkeypatch.undo()
    sys.setprofile(files)
    try:
        batch, _ = splitter.collected([found])
        batch["multi_modal_inputs"][1]["pixel_values"].sum()
    finally:
        sys.setprofile(None)
    assert len(found.samples) == 6
    assert len(files.found) <= 6


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
    from PIL import Image

    Image.new("RGB", (28, 28)).save(tmp_path / "a.png")
    work, letters = {}, Counter()
    tokenizer = processor.tokenizer
    encode = type(tokenizer).encode

    def counted(self, text, **options):
        letters[size] += len(text)
        return encode(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "encode", counted)
    for size in (100, 200, 400):
        user = {
            "role": "user",
            "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Go."}],
        }
        chat = [user, {"role": "assistant", "content": "I go."}] * (size // 2)
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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cls", [StepwiseTrajectorySplitter, TrajectorySplitter])
def test_ten_thousand_messages_are_split(processor, tmp_path, cls):
    chat = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "I go."}] * 5000
    (tmp_path / "long.json").write_text(json.dumps([chat]))
    reader = ChatReader(tmp_path / "long.json")
    samples = next(cls(processor, tmp_path, reader=reader).results(reader.ids())).samples
    assert sum(sample.response_mask.sum() for sample in samples) == 5000 * len(
        processor.tokenizer.encode("I go.<|im_end|>")
    )
