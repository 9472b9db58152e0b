"""Files of chats and of other records, as tests write them."""

import io
import json
import tarfile

import pytest


def talk(answer="ho"):
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]


def atif(steps, **more):
    """A trajectory in Harbor's format."""
    return {"schema_version": "ATIF-v1.7", "session_id": "s", "steps": steps, **more}


def lines(place, *rows):
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


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
