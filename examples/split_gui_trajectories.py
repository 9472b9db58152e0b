"""Screenshots and chats become a training batch in which every answer is trained exactly once."""

import tempfile
import textwrap
from pathlib import Path

from shoal.splitting import StepwiseTrajectorySplitter, build_qwen_processor, load_processor
from shoal.splitting.synthetic import write_gui_recordings


def main() -> None:
    work = Path(tempfile.mkdtemp(prefix="shoal-split-"))
    ids = write_gui_recordings(work / "recordings", 4, steps=(3, 6), size=(640, 400), seed=1)
    processor = load_processor(build_qwen_processor(work / "processor"))

    splitter = StepwiseTrajectorySplitter(processor, work / "recordings", padding="longest")
    batch = splitter.split(ids, reward_tensor=[1.0, 0.0, 0.5, 1.0])

    for name in ("input_ids", "position_ids", "response_mask", "reward_tensor"):
        print(f"{name:<16} {tuple(batch[name].shape)} {batch[name].dtype}")
    counts = batch.summary()
    as_float = sum(item["pixel_values"].nbytes for item in batch["multi_modal_inputs"])
    print(f"{counts['samples']} samples show {counts['images']} images {counts['image_references']} times")
    print(
        f"pixels take {counts['pixel_bytes'] / 2**20:.1f} MiB, as float32 per sample {as_float / 2**20:.0f}"
    )

    sample = batch.samples()[2]
    print(f"\n{sample.dataset_id}, step {sample.step_index + 1} of {sample.n_steps}, trained:")
    text = processor.tokenizer.decode(sample.response_ids[sample.response_mask].tolist())
    print("\n".join(textwrap.fill(line, 80) for line in text.splitlines()))

    assert (batch["reward_tensor"] * batch["response_mask"]).sum() == batch["reward_tensor"].sum()
    batch.save(work / "run" / "batch")
    print(f"\nlook at it: shoal view {work / 'run'}")


if __name__ == "__main__":
    main()
