"""Training on recorded samples: packing changes nothing, kills change nothing, and what is learned is right."""

import json
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.train.agent.policies.test_packing_check import MIXING, OWN_WAYS, engine_of
from transformers import LlamaConfig

from shoal.core.errors import ConfigError, DataError
from shoal.core.files import read_json
from shoal.splitting import (
    Batch,
    ChatReader,
    StepwiseTrajectorySplitter,
    TrajectorySplitter,
    build_qwen_processor,
    load_processor,
)
from shoal.splitting.synthetic import write_button_recordings, write_gui_recordings
from shoal.train.agent.batch.packing import micro_batches, token_values
from shoal.train.agent.batch.samples import Sample
from shoal.train.agent.policies.huggingface import HuggingFacePolicy
from shoal.train.agent.policies.policy import score
from shoal.train.recorded.run import RecordedConfig, tiny_model, train_recorded
from shoal.train.recorded.training import RecordedTrainer, RecordedTraining, likeliest, recorded_samples


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "qwen"
    return load_processor(build_qwen_processor(folder, vocabulary=600, compact=True))


@pytest.fixture
def model(processor):
    return tiny_model(len(processor.tokenizer), processor.image_token_id, 0, width=32, layers=1)


@pytest.fixture
def batch(processor, tmp_path):
    ids = write_gui_recordings(tmp_path / "gui", 3, steps=(1, 3), size=(90, 60), words=(2, 9))
    return TrajectorySplitter(processor, tmp_path / "gui", 2, 2, padding="longest").split(
        ids, [1.0, 0.0, 1.0]
    )


@pytest.fixture
def long_batch(processor, tmp_path):
    """One sample, in whose row there is room for several of `batch`."""
    ids = write_gui_recordings(tmp_path / "long", 1, steps=8, size=(90, 60), words=(2, 9))
    return TrajectorySplitter(processor, tmp_path / "long", 8, 8, padding="longest").split(ids)


def logprobs(model, samples, batching="padded"):
    """Of the trained tokens of each sample."""
    policy = HuggingFacePolicy(model, None, 0)
    return token_values(
        samples, lambda micro: score(policy, micro, 1.0).logprobs, 1 << 30, 0, "cpu", batching
    )


def test_log_probs_in_packed_rows_are_those_of_the_models_own_forward(processor, model, batch, long_batch):
    samples = recorded_samples([*batch.samples(), *long_batch.samples()], "supervised")
    [micro] = micro_batches(samples, 1 << 30, 0, "cpu", "packed")
    assert len(micro.ids) < len(samples)
    packed, count = logprobs(model, samples, "packed"), 0
    for sample, found in zip(samples, packed, strict=True):
        ids = torch.tensor([sample.ids])
        with torch.no_grad():
            made = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == processor.image_token_id).int(),
                **sample.inputs,
            )
        scores = made.logits[0].log_softmax(-1)
        own = [float(scores[place - 1, sample.ids[place]]) for place in sample.trained.tolist()]
        np.testing.assert_allclose(found, own, atol=2e-6, rtol=1e-5)
        count += len(own)
    assert count > 40


def text_batch(tokenizer, folder):
    chat = [{"role": "user", "content": "Where to?"}, {"role": "assistant", "content": "click(1,2)"}]
    (folder / "chats.json").write_text(json.dumps([chat, [*chat, *chat]]))
    reader = ChatReader(folder / "chats.json")
    return TrajectorySplitter(tokenizer, folder, reader=reader, padding="longest").split(reader.ids())


@pytest.mark.parametrize("sees", [True, False], ids=["images", "text"])
def test_the_likeliest_response_is_the_one_that_transformers_writes_greedily(
    processor, model, batch, tmp_path, sees
):
    if not sees:
        batch = text_batch(processor.tokenizer, tmp_path)
        shape = {"vocab_size": len(processor.tokenizer), "hidden_size": 32, "num_hidden_layers": 1}
        model = engine_of(LlamaConfig(**shape, num_attention_heads=4, intermediate_size=48)).module
    found = batch.samples()
    for sample in found:
        answered(sample, written(model, sample, 5)[0])
    assert likeliest(model, found, 0, 300) == [True] * len(found)
    assert likeliest(model, found, 0, 1) == [True] * len(found)  # each in a pass of its own
    for place in (0, 4):
        found[1].response_ids[place] ^= 1
        assert likeliest(model, found, 0, 300) == [number != 1 for number in range(len(found))]
        found[1].response_ids[place] ^= 1
    [first, *_] = found[1].response_ids.tolist()
    assert likeliest(model, [answered(copy(found[1]), [token]) for token in (first, first ^ 1)], 0, 300) == [
        True,
        False,
    ]
    assert likeliest(model, [], 0, 300) == []


def written(model, sample, count, **how):
    """What transformers writes after the prompt of a sample: token ids of each answer."""
    ids, seen = torch.tensor(sample.prompt_ids.tolist())[None], dict(sample.prompt_inputs or {})
    if seen:
        seen["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, pad_token_id=0,
        **{"do_sample": False, **how}, **seen,
    )  # fmt: skip
    return made[:, ids.shape[1] :].tolist()


def answered(sample, tokens):
    """A sample with these tokens in the place of its response."""
    sample.response_ids, sample.response_mask = np.array(tokens, np.int32), np.ones(len(tokens), bool)
    places = sample.prompt_positions.max() + 1 + np.arange(len(tokens))
    sample.response_positions = np.tile(places, (len(sample.prompt_positions), 1))
    sample.inputs = sample.prompt_inputs
    return sample


@pytest.mark.parametrize("objective", ["supervised", "grpo"])
def test_a_step_is_the_same_however_the_minibatch_is_cut(processor, batch, objective):
    found = batch.samples()
    for sample in found:
        sample.uid, sample.logprobs = "one task", np.full(len(sample.response_ids), -6.0, np.float32)
    samples = recorded_samples(found, objective)
    weights = []
    for batching, size in (("packed", 100_000), ("padded", 1), ("packed", 300)):
        model = tiny_model(len(processor.tokenizer), processor.image_token_id, 0, width=32, layers=1)
        config = RecordedTraining(
            objective=objective, batching=batching, micro_batch_tokens=size, learning_rate=1e-3
        )
        trainer = RecordedTrainer(model, samples, config, processor.tokenizer.pad_token_id)
        rows = list(trainer.train())
        weights.append((rows[0]["loss"], rows[0]["grad_norm"]))
    assert weights[0] == pytest.approx(weights[1], rel=1e-4)
    assert weights[0] == pytest.approx(weights[2], rel=1e-4)


def test_the_steps_of_a_pass_are_of_nearly_equal_size(processor, batch):
    """A rest of one sample would make a whole step of the optimizer."""
    samples = (recorded_samples(batch.samples(), "supervised") * 9)[:9]
    model = tiny_model(len(processor.tokenizer), processor.image_token_id, 0, width=32, layers=1)
    sizes = []

    class Counting(RecordedTrainer):
        def gradient_step(self, minibatch):
            sizes.append(len(minibatch))
            return super().gradient_step(minibatch)

    config = RecordedTraining(minibatch_size=4, epochs=1)
    rows = list(Counting(model, samples, config, processor.tokenizer.pad_token_id).train())
    assert sizes == [3, 3, 3]
    assert len(rows) == 3


def test_advantages_compare_recordings_of_one_task_each_once(batch):
    found = batch.samples()
    for sample in found:
        sample.logprobs = np.zeros(len(sample.response_ids), np.float32)
        sample.uid = "a" if sample.traj_index < 2 else "b"
    samples = recorded_samples(found, "grpo")
    told = {s.traj_index: set() for s in found}
    for sample, recorded in zip(found, samples, strict=True):
        told[sample.traj_index] |= set(np.round(recorded.columns["advantages"], 3).tolist())
    # rewards 1 and 0 of task a: mean 0.5, so they are as far above as below; b is alone
    assert len(told[0]) == len(told[1]) == 1
    assert told[2] == {0.0}
    assert told[0].pop() == -told[1].pop() > 0.5
    for sample in found:
        sample.uid = str(sample.traj_index)
    with pytest.raises(DataError, match="several tries of each task"):
        recorded_samples(found, "grpo")
    found[0].logprobs, found[0].uid, found[-1].uid = None, "a", "a"
    with pytest.raises(DataError, match="log-probabilities|several tries"):
        recorded_samples(found, "grpo")


def test_a_sample_without_a_prompt_is_trained_from_its_second_token_on(batch):
    [sample] = batch.samples()[:1]
    sample.logprobs = np.linspace(-2, -1, len(sample.response_ids), dtype=np.float32)
    [before], border = recorded_samples([sample], "supervised"), len(sample.prompt_ids)
    assert before.trained[0] == border
    sample.prompt_ids, sample.prompt_positions = sample.prompt_ids[:0], sample.prompt_positions[:, :0]
    [found] = recorded_samples([sample], "supervised")
    assert found.trained.tolist() == (before.trained[1:] - border).tolist()
    assert found.columns["old_logprobs"].tolist() == before.columns["old_logprobs"][1:].tolist()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["rewards", "a finite log-probability"])
def test_rewards_and_log_probs_that_are_no_numbers_are_refused(batch, where, wrong):
    """One of them would silently count nothing, or all, for the recordings of its task."""
    found = batch.samples()
    for sample in found:
        sample.logprobs = np.zeros(len(sample.response_ids), np.float32)
        sample.uid = "a"
    assert any(s.columns["advantages"].any() for s in recorded_samples(found, "grpo"))
    if where == "rewards":
        found[-1].reward = wrong
    else:
        found[-1].logprobs[0] = wrong
    with pytest.raises(DataError, match=rf"{where}.*trajectory {found[-1].traj_index} \(task a\) has"):
        recorded_samples(found, "grpo")


def test_tokens_that_the_model_does_not_know_are_refused(model, batch):
    samples = recorded_samples(batch.samples(), "supervised")
    known = model.get_input_embeddings().weight.shape[0]
    samples[1] = replace(samples[1], ids=(known, *samples[1].ids[1:]))
    with pytest.raises(DataError, match=f"to {known}, and the model knows those below {known}"):
        RecordedTrainer(model, samples, RecordedTraining(), 0)


@pytest.mark.parametrize(
    "kind",
    [
        "a window in every layer",
        "scaled scores, and none after padding",
        "linear attention in every other layer",
    ],
)
def test_texts_are_learned_from_as_the_model_itself_reads_them(kind):
    """Also by models that look back a few tokens, scale their scores, or mix the samples of a row."""
    model = engine_of((OWN_WAYS | MIXING)[kind]()).module
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    columns = dict.fromkeys(("advantages", "old_logprobs", "rollout_logprobs"), np.ones(7, np.float32))
    texts = [tuple(range(first, first + 12)) for first in (3, 30, 60)]
    samples = [Sample(text, np.arange(5, 12), columns) for text in texts]
    with torch.no_grad():
        scores = model(input_ids=torch.tensor(texts), use_cache=False).logits[:, 4:-1].log_softmax(-1)
    own = scores.gather(2, torch.tensor(texts)[:, 5:, None]).mean()
    [row] = RecordedTrainer(model, samples, RecordedTraining(), 0).train()
    assert row["logprob"] == pytest.approx(float(own), rel=1e-4)


def test_images_that_reach_beyond_what_a_model_looks_back_at_are_refused():
    columns = dict.fromkeys(("advantages", "old_logprobs", "rollout_logprobs"), np.ones(7, np.float32))
    sample = Sample(tuple(range(3, 15)), np.arange(5, 12), columns, np.arange(12)[None])
    model = engine_of(OWN_WAYS["a window in every layer"]()).module
    with pytest.raises(ConfigError, match="a sample has 12 tokens, and this model has layers that look back"):
        RecordedTrainer(model, [sample], RecordedTraining(), 0)


@pytest.mark.parametrize("placement", ["final", "all", "last_step", lambda reward, step, n: reward / n])
def test_advantages_are_those_of_the_rewards_wherever_the_batch_puts_them(processor, tmp_path, placement):
    """Also where the last window of a trajectory has no token to train, and after the batch was written and read."""
    ids = write_gui_recordings(tmp_path / "gui", 3, steps=(2, 7), size=(90, 60), words=(2, 9))
    splitter = TrajectorySplitter(processor, tmp_path / "gui", 1, 1, padding="longest", reward=placement)
    splitter.split(ids, [3.0, 1.0, 2.0]).save(tmp_path / "batch")
    found = Batch.load(tmp_path / "batch").samples()
    assert len({sample.n_steps for sample in found}) > 1
    for sample in found:
        sample.logprobs, sample.uid = np.zeros(len(sample.response_ids), np.float32), "a"
        if sample.is_last_step and sample.traj_index == 0:
            sample.response_mask, sample.rewards = sample.response_mask & False, sample.rewards * 0
    told = {}
    trained = [sample for sample in found if sample.response_mask.any()]
    for sample, recorded in zip(trained, recorded_samples(found, "grpo"), strict=True):
        told.setdefault(sample.traj_index, set()).update(np.round(recorded.columns["advantages"], 3).tolist())
    assert [len(told[index]) for index in range(3)] == [1, 1, 1]
    above, below, between = (told[index].pop() for index in range(3))
    assert above == -below > 0.5
    assert between == 0


def test_a_run_that_was_killed_ends_with_the_weights_of_one_that_was_not(processor, batch, tmp_path):
    samples = recorded_samples(batch.samples(), "supervised")
    config = RecordedTraining(epochs=4, minibatch_size=2, learning_rate=1e-3)

    def trainer():
        model = tiny_model(len(processor.tokenizer), processor.image_token_id, 0, width=32, layers=1)
        return RecordedTrainer(model, samples, config, processor.tokenizer.pad_token_id, seed=5)

    calm = trainer()
    rows = list(calm.train())
    first = trainer()
    for row in first.train():
        if row["iteration"] == 3:
            break
    first.step = 3  # the loop was left before it counted
    first.save(tmp_path / "last")
    second = trainer()
    second.load(tmp_path / "last")
    again = list(second.train())
    assert [row["loss"] for row in again] == [row["loss"] for row in rows[3:]]
    for name, value in calm.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    other = RecordedTrainer(second.model, samples, config, 0, seed=6)
    with pytest.raises(DataError, match="resume with the same settings"):
        other.load(tmp_path / "last")


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 1e-2},
        {"objective": "grpo"},
        {"max_grad_norm": 0.5},
        {"loss_aggregation": "sequence_mean"},
    ],
)
def test_a_run_does_not_go_on_with_other_settings_or_samples(model, batch, tmp_path, change):
    samples = recorded_samples(batch.samples(), "supervised")
    RecordedTrainer(model, samples, RecordedTraining(), 0).save(tmp_path / "last")
    RecordedTrainer(model, samples, RecordedTraining(batching="padded", micro_batch_tokens=9), 0).load(
        tmp_path / "last"
    )
    other = RecordedTrainer(model, samples, RecordedTraining(**change), 0)
    with pytest.raises(DataError, match=f"{next(iter(change))}.*resume with the same settings"):
        other.load(tmp_path / "last")
    other = RecordedTrainer(model, samples[::-1], RecordedTraining(), 0)
    with pytest.raises(DataError, match="samples.*resume with the same settings, recordings"):
        other.load(tmp_path / "last")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"objective": "grpo", "policy_loss": "cispo", "clip_ratio_low": 0.1},
            "^clip_ratio_low=0.1 has no effect",
        ),
        ({"clip_ratio_low": 0.1}, "^clip_ratio_low=0.1 has no effect with objective=supervised"),
        ({"clip_ratio_high": 0.1}, "^clip_ratio_high=0.1 has no effect with objective=supervised"),
        ({"objective": "reinforce"}, "objective must be"),
        ({"loss_aggregation": "mean"}, "loss_aggregation must be"),
        ({"batching": "pack"}, "batching must be"),
        ({"checkpoint_every": -1}, "checkpoint_every must be 0 or positive"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or positive"),
        ({"weight_decay": float("nan")}, "weight_decay must be"),
        ({"clip_ratio_high": -1.0}, "clip_ratio_high must be 0 or positive"),
        ({"policy_loss": "gspo"}, "policy_loss=gspo has no effect with objective=supervised"),
        ({"objective": "grpo", "policy_loss": "gpso"}, "no policy loss named 'gpso'"),
    ],
)
def test_settings_without_effect_or_meaning_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        RecordedTraining(**settings)


def test_a_step_reads_the_settings_that_are_given():
    own = RecordedTraining(objective="grpo", policy_loss="gspo", clip_ratio_low=0.1)
    algorithm = own.algorithm()
    assert (algorithm.policy_loss, algorithm.clip_ratio_low, algorithm.clip_ratio_high) == ("gspo", 0.1, 0.2)
    assert (algorithm.loss_aggregation, algorithm.kl.coef) == ("token_mean", 0.0)


def run_cli(*words):
    from shoal.cli.main import main

    # two threads, the default, wait for each other on a busy machine
    return main(["train-recorded", "--config-name", *words, "threads=1"])


def test_held_out_answers_are_right_where_the_likeliest_answer_was_recorded(tmp_path):
    """A model that always says yes, since most said so, is wrong on the two of eight held-out chats that say no."""
    said = ["no" if number % 4 == 0 else "yes" for number in range(16)]
    chats = [
        [{"role": "user", "content": "Yes or no?"}, {"role": "assistant", "content": word}] for word in said
    ]
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    assert run_cli(
        "recorded", f"recordings={tmp_path / 'chats.json'}", f"run_dir={tmp_path / 'run'}", "heldout=0.5",
        "train.epochs=8", "train.learning_rate=3e-3", "train.minibatch_size=4",
    ) == 0  # fmt: skip
    metrics = read_json(tmp_path / "run" / "summary.json")["metrics"]
    assert (metrics["samples"], metrics["heldout_right"]) == (8, 0.75)


def test_the_tiny_model_knows_every_token_of_a_processor_that_is_given(tmp_path):
    """One that is not compact has the ids of Qwen for its 600 tokens, which lie far above their number."""
    write_button_recordings(tmp_path / "screens", 2, seed=3)
    place = build_qwen_processor(tmp_path / "qwen", vocabulary=600)
    config = RecordedConfig(recordings=str(tmp_path / "screens"), processor=str(place), heldout=0.0)
    said = []
    summary = train_recorded(config, tmp_path / "run", say=said.append)
    assert (summary["status"], summary["metrics"]["samples"]) == ("completed", 2)
    assert str(tmp_path / "run" / "checkpoints" / "last" / "model") in said[-1]


def test_shoal_train_takes_the_configs_of_recordings_too(tmp_path, capsys):
    from shoal.cli.main import main

    write_button_recordings(tmp_path / "screens", 4, seed=3)
    words = [f"recordings={tmp_path / 'screens'}", "heldout=0", "threads=1", "--out", str(tmp_path / "run")]
    assert main(["train", "--config-name", "recorded", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["samples"] == 4
    assert (tmp_path / "run" / "checkpoints" / "last" / "model" / "config.json").is_file()


def test_the_command_trains_evaluates_and_resumes(tmp_path, capsys):
    write_button_recordings(tmp_path / "screens", 20, seed=3)
    same = (f"recordings={tmp_path / 'screens'}", f"run_dir={tmp_path / 'run'}", "train.learning_rate=1e-3")
    assert run_cli("recorded", *same, "train.epochs=2") == 0
    summary = read_json(tmp_path / "run" / "summary.json")
    assert summary["status"] == "completed"
    assert summary["metrics"]["samples"] == 18
    assert 0 <= summary["metrics"]["heldout_right"] <= 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert (tmp_path / "run" / "checkpoints" / "last" / "model" / "config.json").is_file()
    assert run_cli("recorded", *same, "train.epochs=2", "resume=true") == 0
    assert "6/6" not in capsys.readouterr().out.split("held-out")[-1]


@pytest.mark.slow
def test_a_run_is_neither_written_over_nor_told_twice(tmp_path, capsys, monkeypatch):
    write_button_recordings(tmp_path / "screens", 20, seed=3)
    folder, last = tmp_path / "run", tmp_path / "run" / "checkpoints" / "last"
    same = (f"recordings={tmp_path / 'screens'}", f"run_dir={folder}", "heldout=0")

    def told():
        return [json.loads(line)["iteration"] for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def killed(self, folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RecordedTrainer, "save", killed)
        run_cli("recorded", *same)
    assert told() == [1, 2, 3]
    assert run_cli("recorded", *same, "resume=true") == 0
    assert told() == [1, 2, 3]
    before = read_json(folder / "summary.json")
    assert run_cli("recorded", *same) != 0
    assert "holds a run already" in capsys.readouterr().err
    assert told() == [1, 2, 3]
    assert read_json(folder / "summary.json") == before
    last.rename(last.parent / ".last.abcdefgh.old")  # as of a writer that was killed between two renames
    with monkeypatch.context() as patched:
        patched.setattr(RecordedTrainer, "gradient_step", killed)
        assert run_cli("recorded", *same, "resume=true") == 0, "it was done, and began anew"


def test_a_mistake_in_going_on_leaves_a_finished_run_as_it_is(tmp_path, capsys):
    write_button_recordings(tmp_path / "screens", 4, seed=3)
    same = (f"recordings={tmp_path / 'screens'}", f"run_dir={tmp_path / 'run'}", "heldout=0", "resume=true")
    assert run_cli("recorded", *same) == 2
    assert "there is no run" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert run_cli("recorded", *same[:-1]) == 0
    assert read_json(tmp_path / "run" / "summary.json")["command"] == "train-recorded"
    before = (tmp_path / "run" / "summary.json").read_bytes()
    assert run_cli("recorded", *same, "train.learning_rate=0.5") == 2
    assert run_cli("recorded", "recordings=nosuch", *same[1:]) == 2
    assert (tmp_path / "run" / "summary.json").read_bytes() == before


def test_training_on_recordings_does_not_go_on_in_the_folder_of_an_agent(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 40}\n')
    assert run_cli("recorded", "recordings=x", f"run_dir={tmp_path}", "resume=true") == 2
    assert "holds a training with environments" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text() == '{"iteration": 40}\n'


def test_settings_that_are_wrong_are_named(tmp_path, capsys):
    assert run_cli("recorded", "recordings=x", "heldout_samples=0") != 0
    assert "heldout_samples must be at least 1" in capsys.readouterr().err
    assert run_cli("recorded", "recordings=x", "train.epoch=2") != 0
    assert "epochs" in capsys.readouterr().err
    assert run_cli("recorded") != 0
    assert "recordings=" in capsys.readouterr().err


def screens(processor, folder, count, seed):
    ids = write_button_recordings(folder, count, seed=seed)
    return StepwiseTrajectorySplitter(processor, folder, padding="longest").split(ids).samples()


def chance_of_being_right(processor, model, samples):
    """The mean reward of what the model would sample: the chance of the one right answer, over all screens."""
    found = logprobs(model, recorded_samples(samples, "supervised"))
    return float(np.mean([np.exp(tokens.sum()) for tokens in found]))


def record_tries(processor, model, samples, source, root, per_task, seed):
    """Recordings of what the model samples on each screen, with its log-probabilities and rewards."""
    from shoal.splitting.readers.recordings import RolloutTokens, write_rollout

    tokenizer = processor.tokenizer
    end = tokenizer.eos_token_id
    torch.manual_seed(seed)
    for sample in samples:
        tries = written(
            model, sample, 12, do_sample=True, top_k=0, eos_token_id=end, num_return_sequences=per_task
        )
        for number, tokens in enumerate(tries):
            tokens = tokens[: tokens.index(end) + 1] if end in tokens else tokens
            tried = answered(copy(sample), tokens)
            [scores] = logprobs(model, recorded_samples([tried], "supervised"))
            folder = root / f"{sample.dataset_id}_{number}"
            folder.mkdir(parents=True)
            reward = float(tokens == sample.response_ids.tolist())
            (folder / "screen.png").write_bytes((source / sample.dataset_id / "screen.png").read_bytes())
            said = tokenizer.decode(tokens).removesuffix("<|im_end|>") or " "
            chat = [sample.messages[0], {"role": "assistant", "content": said}]
            (folder / "final_messages.json").write_text(json.dumps(chat))
            (folder / "task_config.json").write_text(json.dumps({"id": sample.uid, "reward": reward}))
            write_rollout(
                folder,
                [RolloutTokens(tuple(sample.prompt_ids.tolist()), tuple(tokens), tuple(scores.tolist()), "")],
            )


def lifted(processor, folder, seed, rounds=6):
    """Chances of being right on screens never learned from: of half a policy, and after each round of its tries."""
    from transformers import AutoModelForImageTextToText

    pad = processor.tokenizer.pad_token_id
    unseen = screens(processor, folder / "unseen", 100, 100 * seed)
    model = tiny_model(len(processor.tokenizer), processor.image_token_id, seed)
    shown = recorded_samples(screens(processor, folder / "shown", 400, 100 * seed + 1), "supervised")
    config = RecordedTraining(epochs=40, minibatch_size=16, learning_rate=2e-3)
    for row in RecordedTrainer(model, shown, config, pad, seed).train():
        if row["iteration"] % 5 == 0 and chance_of_being_right(processor, model, unseen[:50]) > 0.42:
            break
    chances, place = [chance_of_being_right(processor, model, unseen)], folder / "half"
    model.save_pretrained(place)
    processor.save_pretrained(folder / "processor")
    for number in range(rounds):
        fresh = screens(processor, folder / f"fresh{number}", 60, 100 * seed + 2 + number)
        tries = folder / f"tries{number}"
        record_tries(processor, model, fresh, folder / f"fresh{number}", tries, 8, 1000 * number)
        assert run_cli(
            "recorded-grpo", f"recordings={tries}", f"model={place}", f"processor={folder / 'processor'}",
            f"run_dir={folder / f'run{number}'}", "train.learning_rate=3e-4", "train.minibatch_size=32",
            "heldout=0", f"seed={seed}",
        ) == 0  # fmt: skip
        place = folder / f"run{number}" / "checkpoints" / "last" / "model"
        model = AutoModelForImageTextToText.from_pretrained(place).eval()
        chances.append(chance_of_being_right(processor, model, unseen))
    return chances


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_recorded_tries_and_their_rewards_lift_a_policy_that_is_right_half_the_time(processor, tmp_path):
    before, *after = lifted(processor, tmp_path, seed=1)
    assert 0.4 < before < 0.6
    assert after[-1] > before + 0.1, (before, after)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_example_ends_in_a_model_that_is_right_on_nine_screens_of_ten(tmp_path):
    from examples.train_on_recordings import run

    assert run(tmp_path) >= 0.9
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"] / 10
