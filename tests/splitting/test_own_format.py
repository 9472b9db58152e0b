"""The page about formats of one's own: its reader reads what the page says it reads."""

import json
import re
from pathlib import Path

from chats import png, tar_of

from shoal.cli.main import main
from shoal.core.files import read_json
from shoal.splitting import Batch

PAGE = Path(__file__).parents[2] / "docs" / "recordings.md"


def test_the_reader_on_the_page_reads_the_line_on_the_page(processor_folder, tmp_path):
    text = PAGE.read_text("utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [line] = re.findall(r'`(\{"id": "a".*?\]\})`', text, re.DOTALL)
    lines = code.split("class ClickReader")[1].splitlines()
    assert len([each for each in code.splitlines() if each.strip()]) <= 20, len(lines)
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "recordings.jsonl").write_text(line.replace("\n", " ") + "\n")
    (tmp_path / "0.png").write_bytes(png(9))
    mine = ["--imports", str(tmp_path / "mine.py"), "--reader", "clicks"]
    same = [*mine, "--processor", str(processor_folder)]
    assert main(["split", str(tmp_path / "recordings.jsonl"), *same, "--out", str(tmp_path / "run")]) == 0
    sample = Batch.load(tmp_path / "run" / "batch").samples()[0]
    assert sample.messages[-1]["content"] == "click(1, 2)"
    assert sample.rewards.sum() == 1.0
    assert (sample.inputs.pixels.picture(0) == 9).all()
    assert read_json(tmp_path / "run" / "summary.json")["metrics"]["samples"] == 1
    files = {"a.json": json.dumps(json.loads(line)).encode(), "a.0.png": png(9)}
    tar_of(tmp_path / "all.tar", files)
    assert main(["split", str(tmp_path / "all.tar"), *same, "--out", str(tmp_path / "tar")]) == 0
    other = Batch.load(tmp_path / "tar" / "batch").samples()[0]
    assert other.input_ids.tolist() == sample.input_ids.tolist()
