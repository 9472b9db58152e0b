from dataclasses import replace

import pytest
import torch

from shoal.core.errors import DataError
from shoal.splitting import StepwiseTrajectorySplitter
from shoal.splitting.readers.recordings import FolderReader, RolloutTokens, read_rollout, write_rollout


@pytest.fixture
def sampled(processor, make_root):
    """A recording with what the sampler saw and wrote; its tokens differ from encoding the text again."""
    root, ids = make_root(1, steps=3, size=(90, 70))
    plain = StepwiseTrajectorySplitter(processor, root, padding="longest").split(ids)
    steps = []
    for number, sample in enumerate(plain.samples()):
        response = [*processor.tokenizer.encode("T"), *sample.response_ids[1:].tolist()]
        logprobs = tuple(-0.25 * (number + 1) - index / 64 for index in range(len(response)))
        steps.append(RolloutTokens(tuple(sample.prompt_ids.tolist()), tuple(response), logprobs, "test"))
    return root, ids, steps, plain


def split(processor, root, ids, **options):
    splitter = StepwiseTrajectorySplitter(processor, root, use_vllm_logp=True, padding="longest", **options)
    return splitter.split(ids)


@pytest.mark.parametrize("form", ["pt", "pt with lists", "safetensors", "collapsed prompt", "from 1"])
def test_recorded_tokens_and_logprobs_are_used_as_they_are(processor, sampled, form):
    root, ids, steps, plain = sampled
    folder = root / ids[0]
    if form == "safetensors":
        write_rollout(folder, steps)
    for number, step in enumerate(steps if form != "safetensors" else ()):
        prompt = list(step.prompt_ids)
        if form == "collapsed prompt":  # one image token each, as before the processor spread them out
            prompt = [t for i, t in enumerate(prompt) if t != 151655 or prompt[i - 1] != 151655]
        values = {
            "token_ids": list(step.response_ids),
            "logp": list(step.logprobs),
            "prompt_token_ids": prompt,
        }
        if form == "pt":
            values = {name: torch.tensor(value) for name, value in values.items()}
        torch.save(values, folder / f"data_for_step_{number + (form == 'from 1')}.pt")
    batch = split(processor, root, ids)
    assert len(batch["uid"]) == 3
    for sample, step, before in zip(batch.samples(), steps, plain.samples(), strict=False):
        assert sample.prompt_ids.tolist() == list(step.prompt_ids)
        assert sample.response_ids.tolist() == list(step.response_ids)
        assert sample.position_ids.tolist() == before.position_ids.tolist()
        assert torch.equal(sample.inputs["pixel_values"], before.inputs["pixel_values"])
    for row, step in enumerate(steps[: len(batch["uid"])]):
        n = len(step.response_ids)
        assert batch["rollout_log_probs"][row, :n].tolist() == list(step.logprobs)
        assert (batch["rollout_log_probs"][row, n:] == 0).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"token_ids": [1]}, "has no 'logp'"),
        ([1, 2], "by name"),
        ({"token_ids": [1, 2, 3], "logp": [-1.0, -1.0]}, "3 token_ids but 2 logp"),
        ({"token_ids": [1], "logp": [0.5]}, "at most 0"),
        ({"token_ids": ["a"], "logp": [-1.0]}, "flat lists"),
        (
            {"token_ids": [1], "logp": [-1.0], "images": RolloutTokens((), (), (), "")},
            "without Python objects",
        ),
    ],
)
def test_broken_step_files_are_refused(tmp_path, values, message):
    torch.save(values, tmp_path / "data_for_step_0.pt")
    with pytest.raises(DataError, match=message):
        read_rollout(tmp_path)


def test_gaps_and_doubles_in_step_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="has no data_for_step"):
        read_rollout(tmp_path)
    step = RolloutTokens((1,), (2,), (-1.0,), "")
    write_rollout(tmp_path, [step, step, step])
    (tmp_path / "data_for_step_1.safetensors").unlink()
    with pytest.raises(DataError, match=r"must count up from 0 or 1, got \[0, 2\]"):
        read_rollout(tmp_path)
    torch.save({"token_ids": [1], "logp": [-1.0]}, tmp_path / "data_for_step_0.pt")
    with pytest.raises(DataError, match="are both step 0"):
        read_rollout(tmp_path)


def test_too_few_steps_and_foreign_prompts_are_refused(processor, sampled):
    root, ids, steps, _ = sampled
    write_rollout(root / ids[0], steps[:2])
    with pytest.raises(DataError, match="2 recorded steps, but more answers"):
        split(processor, root, ids)
    foreign = RolloutTokens((*steps[2].prompt_ids, 151655), steps[2].response_ids, steps[2].logprobs, "")
    write_rollout(root / ids[0], [*steps[:2], foreign])
    with pytest.raises(DataError, match="image tokens in runs of"):
        split(processor, root, ids)


@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        ((5, -100), (-1.0, -1.0), "token ids must be whole numbers, none below 0"),
        ((5, 6.5), (-1.0, -1.0), "token ids must be whole numbers"),
        ((5, 2**31), (-1.0, -1.0), "token ids must be whole numbers"),
        ((5, 6), (-1.0, float("nan")), "finite log-probabilities"),
        ((5, 6), (-1.0, float("-inf")), "finite log-probabilities"),
        ((5, 6), (-1.0, None), "finite log-probabilities"),
        ((5, 6), (-1.0,), "2 token_ids but 1 logp"),
        ((), (), "no tokens"),
    ],
)
def test_tokens_of_any_reader_are_checked_before_they_train(processor, sampled, ids, logprobs, message):
    root, names, steps, _ = sampled

    class Mine(FolderReader):
        def read(self, dataset_id, path=None):
            found = super().read(dataset_id, path)
            return replace(found, steps=(*steps[:2], RolloutTokens((), ids, logprobs, "my file")))

    with pytest.raises(DataError, match=f"my file: .*{message}"):
        split(processor, root, names, reader=Mine(root))
