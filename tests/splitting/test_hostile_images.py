"""Image files and recordings made to harm: each is a named error, and nothing is written where it must not be."""

import base64
import io
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from shoal.core.errors import DataError
from shoal.core.seeding import stream
from shoal.splitting import StepwiseTrajectorySplitter, TrajectorySplitter
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
        (folder / name).mkdir()
        (folder / name / "screen.png").write_bytes(shown)
        chat = [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Click."}, {"type": "image", "image": "screen.png"}],
            },
            {"role": "assistant", "content": "click(1, 2)"},
        ]
        (folder / name / "final_messages.json").write_text(json.dumps(chat))
        (folder / name / "task_config.json").write_text(json.dumps({"id": name}))
    return folder


HARM = {
    "IPTC": iptc((28, 28), encoded("JPEG", 1400, 1400)),
    "EPS": encoded("EPS"),
    "ICO": encoded("ICO", 64, 64),
    "TIFF": encoded("TIFF"),
    "PPM": encoded("PPM"),
    "PDF": encoded("PDF"),
    "nothing": b"",
    "text": b"no image at all",
    "torn PNG": encoded("PNG")[:200],
    "torn JPEG": encoded("JPEG")[:-500],
    "bomb": encoded("PNG").replace(struct.pack(">II", 56, 56), struct.pack(">II", 60_000, 60_000)),
}


@pytest.mark.parametrize("kind", HARM)
@pytest.mark.parametrize("store", ["u8", "float32"])
def test_a_file_that_is_no_screenshot_is_named_and_left_out(processor, tmp_path, kind, store):
    root = recordings(tmp_path / "recordings", HARM[kind])
    splitter = StepwiseTrajectorySplitter(processor, root, on_error="skip", store=store)
    batch = splitter.split(["hostile", "calm"], [1.0, 0.0])
    assert [item.dataset_id for item in batch.skipped] == ["hostile"]
    assert "screen.png" in batch.skipped[0].reason
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


@pytest.mark.parametrize("store", ["u8", "float32"])
@pytest.mark.parametrize("size", [(28, 28), (1400, 1400), (84, 28)])
def test_a_file_that_changes_between_two_looks_is_an_error(processor, tmp_path, monkeypatch, store, size):
    import shoal.splitting.images as images

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


FUZZ = """
import json, sys, numpy as np
from pathlib import Path
from PIL import Image
from shoal.core.errors import DataError
from shoal.splitting import StepwiseTrajectorySplitter, TrajectorySplitter, load_processor
root, seeds = Path(sys.argv[2]), [path.read_bytes() for path in sorted(Path(sys.argv[3]).iterdir())]
rng, processor = np.random.default_rng(7), load_processor(sys.argv[1])
kept = {name: (root / "r" / name).read_bytes() for name in ("final_messages.json", "task_config.json")}
splitters = [StepwiseTrajectorySplitter(processor, root, store=store, max_image_pixels=4_000_000, padding="longest")
             for store in ("u8", "float32")]
splitters.append(TrajectorySplitter(processor, root, 2, 1, max_image_pixels=4_000_000, padding="longest"))
read = refused = 0
for number in range(int(sys.argv[4])):
    of_image = rng.random() < 0.7
    data = bytearray(seeds[rng.integers(len(seeds))] if of_image else kept["final_messages.json"])
    for _ in range(rng.integers(1, 9)):
        kind, at = rng.integers(4), int(rng.integers(len(data)))
        if kind == 0:
            data[at] = rng.integers(256)
        elif kind == 1:
            del data[at : at + int(rng.integers(1, 40))]
        elif kind == 2:
            data[at:at] = rng.integers(0, 256, rng.integers(1, 40), dtype=np.uint8).tobytes()
        else:
            data[at : at + 4] = b"\\xff\\xff\\xff\\xff"[: max(1, len(data[at : at + 4]))]
        if not data:
            break
    (root / "r" / "screen.png").write_bytes(bytes(data) if of_image else seeds[0])
    (root / "r" / "final_messages.json").write_bytes(kept["final_messages.json"] if of_image else bytes(data))
    try:
        batch = splitters[number % 3].split(["r"], [1.0])
        for inputs in batch["multi_modal_inputs"]:
            if inputs:
                picture = Image.open(root / "r" / "screen.png").convert("RGB")
                same = [picture] * len(inputs["image_grid_thw"])
                wanted = processor.image_processor(images=same, return_tensors="pt")
                assert (inputs["pixel_values"] == wanted["pixel_values"]).all()
        read += 1
    except DataError as error:
        assert "trajectory 'r'" in str(error)
        refused += 1
print(read, refused)
"""


@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_mutated_images_and_recordings_are_read_as_they_say_or_refused(processor_folder, tmp_path):
    """Through the whole splitter, with the bounds of the compiled loops checked: no crash and no wrong pixel."""
    (tmp_path / "seeds").mkdir()
    for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF"):
        (tmp_path / "seeds" / kind).write_bytes(encoded(kind))
    recordings(tmp_path / "root", encoded("PNG"))
    (tmp_path / "root" / "hostile").rename(tmp_path / "root" / "r")
    checked = {
        "PYTHONFAULTHANDLER": "1",
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(tmp_path / "numba"),
    }
    done = subprocess.run(
        [sys.executable, "-c", FUZZ, processor_folder, tmp_path / "root", tmp_path / "seeds", "5000"],
        capture_output=True, text=True, env={**os.environ, **checked}, timeout=1100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    read, refused = map(int, done.stdout.split())
    assert read + refused == 5000
    assert min(read, refused) > 250


def test_the_compiled_loops_are_checked_where_numba_is_told_to(tmp_path):
    """The environment of the test above does what it is meant to: a loop that leaves its array is an error there."""
    code = (
        "import numpy as np; from shoal.splitting.images import compiled_loops\ncut, _ = compiled_loops()\n"
        "try:\n    cut(np.zeros((28, 28, 3), np.uint8), 14, 2, np.zeros((1, 3, 196), np.uint8))\n"
        "except IndexError:\n    print('refused')"
    )
    checked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **checked}
    )
    assert done.stdout.strip() == "refused", done.stderr


def test_lines_of_json_may_hold_every_separator_of_unicode(processor, tmp_path):
    said = "one\u2028two\u2029three\x85four\x0bfive\x1c"
    chats = [{"id": f"c{i}", "messages": [{"role": "user", "content": said}, {"role": "assistant", "content": "x"}]}
             for i in range(2)]  # fmt: skip
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps(chat, ensure_ascii=False) for chat in chats) + "\n", "utf-8")
    from shoal.splitting.readers import ChatReader

    reader = ChatReader(file)
    assert reader.ids() == ["c0", "c1"]
    assert reader.read("c1").messages[0].content == said


REFUSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_without_a_system_role_splits_chats_without_one(processor, tmp_path):
    import copy

    tokenizer = copy.deepcopy(processor.tokenizer)
    tokenizer.chat_template = REFUSES_SYSTEM
    chat = [("user", "Hello."), ("assistant", "Hi."), ("user", "Bye."), ("assistant", "Bye bye.")]
    for name, lead in (("plain", []), ("refused", [("system", "Be kind.")])):
        (tmp_path / name).mkdir()
        messages = [{"role": role, "content": text} for role, text in [*lead, *chat]]
        (tmp_path / name / "final_messages.json").write_text(json.dumps(messages))
        (tmp_path / name / "task_config.json").write_text(json.dumps({"id": name}))
    splitter = TrajectorySplitter(tokenizer, tmp_path, on_error="skip")
    batch = splitter.split(["plain", "refused"], [1.0, 1.0])
    assert [item.dataset_id for item in batch.skipped] == ["refused"]
    assert "System role not supported" in batch.skipped[0].reason
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in chat)
    ids = batch["input_ids"][0][batch["attention_mask"][0].bool()]
    assert tokenizer.decode(ids) == text.removesuffix("\n")
    with pytest.raises(DataError, match="'refused' cannot be split.*System role not supported"):
        TrajectorySplitter(tokenizer, tmp_path).split(["refused"], [1.0])


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


@pytest.mark.slow
def test_three_hundred_hostile_recordings_are_each_refused_by_name_and_cost_little(
    processor_folder, tmp_path
):
    program = Path(__file__).with_name("hostile_corpus.py")
    done = subprocess.run(
        [sys.executable, program, processor_folder, tmp_path], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["files"] == 300
    assert told["passed"] == []
    assert told["refused"] == 300
    assert told["opened"] == []  # nothing outside, no program, no connection
    assert told["risen"] < 200  # MiB
