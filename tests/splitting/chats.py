"""Files of chats and of other records, as tests write them."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from shoal.splitting import ChatReader, StepwiseTrajectorySplitter


def talk(answer="ho", question="hi", **more):
    """A question and its answer, with what stands beside the answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]


def read_row(folder, row):
    """The recording of the only row of a file."""
    return ChatReader(lines(folder / "a.jsonl", row)).read("a-000000")


def folder_of(place, messages, **config):
    """The folder of a recording, with a configuration where there is one."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "final_messages.json").write_text(json.dumps(messages))
    if config:
        (place / "task_config.json").write_text(json.dumps(config))
    return place


def osworld_of(place, *steps):
    """The folder of a task of OSWorld, whose steps count from 1."""
    place.mkdir(parents=True)
    (place / "instruction.txt").write_text("Go.")
    lines(place / "traj.jsonl", *({"step_num": n, **step} for n, step in enumerate(steps, 1)))


def rewrite(folder, change):
    """Change the messages of a folder in place."""
    messages = json.loads((folder / "final_messages.json").read_text())
    change(messages)
    folder_of(folder, messages)


def split_all(processor, reader, cls=StepwiseTrajectorySplitter, *sizes, **options):
    """One batch of all recordings that a reader finds."""
    splitter = cls(processor, ".", *sizes, reader=reader, padding="longest", **options)
    return splitter.split(reader.ids())


def atif(steps, **more):
    """A trajectory in Harbor's format."""
    return {"schema_version": "ATIF-v1.7", "session_id": "s", "steps": steps, **more}


def lines(place, *rows):
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def png(grey=0):
    """The bytes of an image of one colour."""
    file = io.BytesIO()
    Image.fromarray(np.full((56, 56, 3), grey, np.uint8)).save(file, "PNG")
    return file.getvalue()


def tar_of(place, files):
    """An archive of files by their names, with links to where a text says."""
    with tarfile.open(place, "w") as archive:
        for name, data in files.items():
            about = tarfile.TarInfo(name)
            if isinstance(data, str):
                about.type, about.linkname = tarfile.SYMTYPE, data
            else:
                about.size = len(data)
            archive.addfile(about, io.BytesIO(data) if isinstance(data, bytes) else None)
    return place


def rows_in(place, rows):
    """A file of rows of the kind that its ending says."""
    if place.suffix == ".jsonl":
        return lines(place, *rows)
    if place.suffix == ".tar":
        return tar_of(place, {f"r{n}.json": json.dumps(row).encode() for n, row in enumerate(rows)})
    if place.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), place, row_group_size=2)
    else:
        place.write_text(json.dumps(rows))
    return place
