"""Three hundred recordings made to harm; run as a program, it splits them and says what each did.

    python hostile_corpus.py PROCESSOR FOLDER

Prints one JSON line: how many were refused by name, those that were not, what was opened outside, and how far memory
rose (MiB).
"""

import base64
import io
import json
import os
import resource
import struct
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

KINDS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
CHAT = [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image", "image": "screen.png"}]},
        {"role": "assistant", "content": "click(1, 2)"}]  # fmt: skip


def image(kind, width=64, height=48, mode="RGB"):
    noise = np.random.default_rng(len(kind)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(file, kind)
    return file.getvalue()


def says(kind, width, height):
    """An image file that says another size than it has."""
    data = bytearray(image(kind))
    if kind == "PNG":
        data[16:24] = struct.pack(">II", width, height)
    elif kind == "BMP":
        data[18:26] = struct.pack("<ii", width, height)
    elif kind == "GIF":
        data[6:10] = struct.pack("<HH", width % 65536, height % 65536)
        at = data.index(b",", 13 + 3 * 256)
        data[at + 5 : at + 9] = struct.pack("<HH", width % 65536, height % 65536)
    else:
        at = data.index(b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack(">HH", height % 65536, width % 65536)
    return bytes(data)


def corpus():
    """(family, what makes the recording in its folder) of each."""
    for n in range(40):  # bombs: small files that promise a great deal
        kind, side = ("PNG", "BMP", "GIF", "JPEG")[n % 4], (20_000, 30_000, 60_000, 65_000, 12_345)[n % 5]
        yield "bomb", shown(says(kind, side, side + n))
    for n in range(40):  # files that hold less than they say
        kind = ("PNG", "BMP")[n % 2]
        yield "liar", shown(says(kind, 64 + 8 * (n + 1), 48 + 16 * (n + 1)))
    for n in range(70):  # torn
        data = image(KINDS[n % 5])
        yield "torn", shown(data[: int(len(data) * (0.05 + 0.8 * (n // 5) / 14))])
    for n, kind in enumerate(["EPS", "ICO", "TIFF", "PPM", "PDF", "TGA", "PCX", "SGI", "IM", "DDS"] * 2):
        yield "format", shown(image(kind) if n < 10 else image(kind)[n:] + b"\x00" * n)
    for data in (b"", b"\x00" * 100, b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg/>", b"GIF89a", b"\x89PNG\r\n\x1a\n", b"BM",
                 b"RIFF", b"\xff\xd8\xff", b"#!/bin/sh\nexit\n"):  # fmt: skip
        yield "format", shown(data)
    outside = ["../secret.png", "../../secret.png", "/etc/passwd", "file:///etc/passwd", "a/../../secret.png", "\x00",
               "screen.png\x00.png", "http://example.org/a.png", "https://example.org/a.png", "~/secret.png",
               "./../secret", "....//secret.png", "C:\\secret.png", "screen.png/../../secret.png", "missing.png",
               "/dev/zero", "/proc/self/environ", "..", "x" * 5000, "/"]  # fmt: skip
    for reference in outside:
        yield "link", chat([{"role": "user", "content": [{"type": "image", "image": reference}]}, CHAT[1]])
    for target in ("../secret.png", "/etc/passwd", "screen.png", "../..", "/dev/zero"):
        yield "link", linked(target)
        yield "link", linked(target, "final_messages.json")
    half = '[{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "x"}]'
    for text in (b"\xff\xfe\xfd", "é".encode("latin-1"), half.encode(), b"\x00", b'{"a"', b"[]", b"{}", b"null", b"1",
                 b'"x"', b"[" * 100_000, b'{"a":' * 50_000, b"[" + b"9" * 10_000 + b"]", b"NaN", b"[NaN]", b"[1e999]",
                 json.dumps(CHAT).encode("cp037"), json.dumps(CHAT).encode("utf-7") + b"\xff", b"\x80" * 1000,
                 json.dumps(CHAT).encode()[:-3]):  # fmt: skip
        yield "encoding", written(text)
    wrong = [{"role": "user"}, {"role": "owner", "content": "x"}, {"role": "user", "content": 1},
             {"role": "user", "content": [1]}, {"role": "user", "content": [{"type": "video", "video": "a"}]},
             {"role": "user", "content": [{"type": "image"}]},
             {"role": "user", "content": [{"type": "image", "image": 7}]},
             {"role": "user", "content": [{"type": "text"}]}, {"role": ["user"], "content": "x"}, None]  # fmt: skip
    for message in wrong:
        yield "shape", chat([message, CHAT[1]])
        yield "shape", chat([CHAT[0], {"role": "assistant", "content": [message]}])
    for said in ({"tool_calls": 7}, {"tool_calls": [7]}, {"tool_calls": [{"function": {}}]},
                 {"tool_calls": [{"function": 1}]},
                 {"tool_calls": {"name": "x"}}, {"content": {"a": 1}},
                 {"content": [{"type": "image", "image": "screen.png"}]},
                 {"content": 1.5}, {"content": [None]}, {"content": [[]]}):  # fmt: skip
        yield "shape", chat([CHAT[0], {"role": "assistant", "content": None, **said}])
    for url in ("data:", "data:image/png;base64,", "data:image/png;base64,!!!!", "data:text/html;base64,eHg=",
                "data:image/png,x",
                "data:image/png;base64,eHg", "data:image/png;base64," + "A" * 4000,
                "data:image/png;base64," + base64.b64encode(image("EPS")).decode(),
                "data:image/png;base64," + base64.b64encode(says("PNG", 50_000, 50_000)).decode(),
                "data:image/png;base64," + base64.b64encode(image("PNG")[:99]).decode()):  # fmt: skip
        yield "data", chat([{"role": "user", "content": [{"type": "image", "image": url}]}, CHAT[1]])
    for n in range(30):
        yield "archive", archived(n)


def shown(data):
    def make(folder):
        (folder / "screen.png").write_bytes(data)
        (folder / "final_messages.json").write_text(json.dumps(CHAT))

    return make


def chat(messages):
    def make(folder):
        (folder / "screen.png").write_bytes(image("PNG"))
        (folder / "final_messages.json").write_text(json.dumps(messages))

    return make


def written(text):
    def make(folder):
        (folder / "screen.png").write_bytes(image("PNG"))
        (folder / "final_messages.json").write_bytes(text)

    return make


def linked(target, name="screen.png"):
    def make(folder):
        if name == "screen.png":
            (folder / "final_messages.json").write_text(json.dumps(CHAT))
        (folder / name).symlink_to(target)

    return make


def archived(number):
    """A `.tar` whose one record is wrong in some way."""

    def make(folder):
        place = folder / "all.tar"
        with tarfile.open(place, "w") as archive:
            body = json.dumps({"messages": CHAT}).encode()
            member = tarfile.TarInfo(("a.json", "../a.json", "/a.json")[number % 3])
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
            link = tarfile.TarInfo("a.screen.png")
            link.type = (
                tarfile.SYMTYPE,
                tarfile.LNKTYPE,
                tarfile.CHRTYPE,
                tarfile.FIFOTYPE,
                tarfile.DIRTYPE,
            )[number % 5]
            link.linkname = ("/etc/passwd", "../secret.png", str(folder.parent / "secret.png"))[number % 3]
            archive.addfile(link)
        data = place.read_bytes()
        if number >= 15:  # torn, or scribbled over
            data = data[: 100 + 40 * (number - 15)] if number % 2 else b"\xff" * 300 + data[300:]
        place.write_bytes(data)

    return make


def main(processor_folder, root):
    from shoal.core.errors import DataError
    from shoal.splitting import ChatReader, StepwiseTrajectorySplitter, load_processor

    Image.init()
    (root / "secret.png").write_bytes(image("PNG"))
    inside = root / "recordings"
    made = []
    for number, (family, make) in enumerate(corpus()):
        folder = inside / f"{family}_{number:03d}"
        folder.mkdir(parents=True)
        make(folder)
        (folder / "task_config.json").write_text(json.dumps({"id": "t"}))
        made.append(folder)
    opened = []
    processor = load_processor(processor_folder)
    splitter = StepwiseTrajectorySplitter(processor, inside)
    secrets = ("secret.png", "/etc/passwd", "/dev/zero", "/proc/self/environ")

    def watch(event, arguments):
        if event == "open" and str(arguments[0]).endswith(secrets):
            opened.append(str(arguments[0]))
        if event in ("subprocess.Popen", "os.system", "os.exec", "socket.connect"):
            opened.append(event)

    sys.addaudithook(watch)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused, passed = 0, []
    for folder in made:
        try:
            if (folder / "all.tar").exists():
                reader = ChatReader(folder / "all.tar")
                names = reader.ids()
                StepwiseTrajectorySplitter(processor, inside, reader=reader).split(names or ["none"])
            else:
                splitter.split([folder.name])
        except DataError as error:
            named = folder.name in str(error) or "all" in str(error)
            refused += named
            if not named:
                passed.append(f"{folder.name}: {error}")
        except BaseException as error:
            passed.append(f"{folder.name}: {type(error).__name__}: {error}"[:300])
        else:
            passed.append(f"{folder.name}: split")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(json.dumps({"files": len(made), "refused": refused, "passed": passed, "opened": opened,
                      "risen": (after - before) // 1024}))  # fmt: skip


if __name__ == "__main__":
    os.umask(0o077)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
