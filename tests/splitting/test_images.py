"""Image files: what is read, how, and that a hostile one is an error that names it."""

import base64
import io
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from chats import folder_of, talk
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from shoal.core.errors import DataError
from shoal.core.seeding import stream
from shoal.splitting import StepwiseTrajectorySplitter, images
from shoal.splitting.images import cut_patches, decode_rgb, image_size


def encoded(kind, width=56, height=56, mode="RGB"):
    """The bytes of an image of noise."""
    noise = stream(0, "test", kind).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(file, kind)
    return file.getvalue()


def iptc(size, inner):
    """An IPTC record that says `size` and holds the whole file `inner`."""

    def field(record, number, data):
        if len(data) < 32768:
            return struct.pack(">BBBH", 0x1C, record, number, len(data)) + data
        return struct.pack(">BBBHI", 0x1C, record, number, 0x8004, len(data)) + data

    head = field(3, 60, b"\x01\x00") + field(3, 20, struct.pack(">H", size[0]))
    return head + field(3, 30, struct.pack(">H", size[1])) + field(3, 120, b"\x01") + field(8, 10, inner)


def recordings(folder, image):
    """Two recordings, of which the first shows `image`."""
    good = folder / "good.png"
    folder.mkdir()
    good.write_bytes(encoded("PNG"))
    for name, shown in (("hostile", image), ("calm", good.read_bytes())):
        asked = [{"type": "text", "text": "Click."}, {"type": "image", "image": "screen.png"}]
        place = folder_of(folder / name, talk(question=asked))
        (place / "screen.png").write_bytes(shown)
    return folder


def says(kind, width, height):
    """An image whose header says another size than it has."""
    data = bytearray(encoded(kind))
    at, form = {"PNG": (16, ">II"), "BMP": (18, "<ii"), "GIF": (6, "<HH")}[kind]
    data[at : at + struct.calcsize(form)] = struct.pack(form, width, height)
    return bytes(data)


HARM = {
    "IPTC": iptc((28, 28), encoded("JPEG", 1400, 1400)),
    **{kind: encoded(kind) for kind in ("EPS", "TIFF", "PPM", "PDF", "TGA", "PCX", "SGI", "DDS")},
    "ICO": encoded("ICO", 64, 64),
    "nothing": b"",
    "text": b"no image at all",
    "zeros": b"\x00" * 100,
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n",
    "SVG": b"<svg/>",
    "program": b"#!/bin/sh\nexit\n",
    **{f"head of {kind}": encoded(kind)[:12] for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF")},
    **{f"torn {kind}": encoded(kind)[:-500] for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF")},
    **{
        f"{kind} that promises 3.6 billion pixels": says(kind, 60_000, 60_000)
        for kind in ("PNG", "BMP", "GIF")
    },
    **{f"{kind} that says too much": says(kind, 112, 112) for kind in ("PNG", "BMP")},
}


@pytest.mark.parametrize("store", ["u8", "float32"])
def test_files_that_are_no_screenshots_are_named_and_left_out(processor, tmp_path, store):
    root = recordings(tmp_path / "recordings", b"")
    for name, data in HARM.items():
        shutil.copytree(root / "hostile", root / name)
        (root / name / "screen.png").write_bytes(data)
    splitter = StepwiseTrajectorySplitter(processor, root, on_error="skip", store=store, padding="longest")
    batch = splitter.split([*HARM, "calm"])
    assert [item.dataset_id for item in batch.skipped] == list(HARM)
    assert all("screen.png" in item.reason for item in batch.skipped)
    assert batch["dataset_ids"].tolist() == ["calm"]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_formats_of_screenshots_are_read_as_pillow_reads_them(tmp_path, kind):
    (tmp_path / "a.png").write_bytes(encoded(kind))
    found = np.asarray(decode_rgb(str(tmp_path / "a.png")))
    assert np.array_equal(found, np.asarray(Image.open(io.BytesIO(encoded(kind))).convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_a_transparent_image_has_the_pixels_of_the_processor(processor, tmp_path, mode):
    image = Image.new("RGBA", (112, 56), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (10, 20, 60, 30))
    image.paste((200, 0, 0, 128), (60, 20, 90, 30))
    image = image.quantize(16) if mode == "P" else image.convert(mode)
    file = io.BytesIO()
    image.save(file, "PNG")
    root = recordings(tmp_path / "recordings", file.getvalue())
    sample = StepwiseTrajectorySplitter(processor, root, padding="longest").split(["hostile"]).samples()[0]
    wanted = processor.image_processor(images=[Image.open(io.BytesIO(file.getvalue()))], return_tensors="pt")
    assert (sample.inputs["pixel_values"] == wanted["pixel_values"]).all()


UPRIGHT = {
    1: lambda a: a,
    2: np.fliplr,
    3: lambda a: np.rot90(a, 2),
    4: np.flipud,
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).swapaxes(0, 1),
    8: np.rot90,
    9: lambda a: a,
}


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_an_image_stands_as_its_exif_says(tmp_path, kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    noise = Image.open(io.BytesIO(encoded("PNG", 56, 28)))
    noise.save(tmp_path / "a", kind, exif=exif.tobytes())
    with Image.open(tmp_path / "a") as kept:
        lying = np.asarray(kept.convert("RGB"))
    found = decode_rgb(str(tmp_path / "a"))
    assert np.array_equal(np.asarray(found), UPRIGHT[orientation](lying))
    assert image_size(str(tmp_path / "a")) == found.size


def test_exif_that_nobody_can_read_turns_nothing(tmp_path):
    text = PngInfo()
    text.add_text("Raw profile type exif", "\nexif\n 5\nzzzz\n")
    noise = Image.open(io.BytesIO(encoded("PNG", 56, 28)))
    noise.save(tmp_path / "a.png", pnginfo=text)
    assert np.array_equal(np.asarray(decode_rgb(str(tmp_path / "a.png"))), np.asarray(noise))


@pytest.mark.parametrize(
    ("store", "size"), [("u8", (28, 28)), ("u8", (1400, 1400)), ("u8", (84, 28)), ("float32", (28, 28))]
)
def test_a_file_that_changes_between_two_looks_is_an_error(processor, tmp_path, monkeypatch, store, size):
    root = recordings(tmp_path / "recordings", encoded("PNG", 280, 280))
    screen = root / "hostile" / "screen.png"

    def look_and_change(place, most):
        found = image_size(place, most)
        if place == str(screen.resolve()):
            screen.write_bytes(encoded("PNG", *size))
        return found

    monkeypatch.setattr(images, "image_size", look_and_change)
    splitter = StepwiseTrajectorySplitter(processor, root, on_error="skip", store=store)
    batch = splitter.split(["hostile", "calm"], [1.0, 1.0])
    assert f"{size[0]}x{size[1]}, another size" in batch.skipped[0].reason


@pytest.mark.parametrize(
    ("image", "out"),
    [
        ((28, 28, 3), (3, 3, 196)),
        ((28, 42, 3), (4, 3, 196)),
        ((28, 28, 4), (4, 3, 196)),
        ((28, 28), (4, 3, 196)),
    ],
)
def test_the_loop_over_pixels_is_never_entered_with_shapes_that_do_not_agree(image, out):
    with pytest.raises(ValueError, match="does not go into"):
        cut_patches(np.zeros(image, np.uint8), 14, 2, np.zeros(out, np.uint8))


def test_an_image_of_16_bits_is_refused_and_not_made_white(tmp_path):
    grey = (np.arange(64, dtype=np.uint16) * 1000).reshape(8, 8)
    Image.fromarray(grey).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match="deep.png is broken .*more than 8 bits, mode I;16; convert it"):
        decode_rgb(str(tmp_path / "deep.png"))


def test_a_data_url_is_held_to_the_same(tmp_path):
    for kind in ("EPS", "ICO", "IPTC"):
        url = "data:image/png;base64," + base64.b64encode(HARM[kind]).decode()
        with pytest.raises(DataError, match="is none of PNG"):
            image_size(url)
    assert image_size("data:image/png;base64," + base64.b64encode(encoded("PNG")).decode()) == (56, 56)
    assert not any(Path(tmp_path).iterdir())
