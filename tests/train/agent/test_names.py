"""A name sets what its paper sets, unless the config says otherwise; what a user registers is a name like any other."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.train.agent.algorithms.test_conflicts import read
from tests.train.agent.run.test_crash_points import train
from tests.train.agent.tiny_model import write_tiny_model

import shoal.train.agent.trainer as trainer_module
from shoal.core.errors import ConfigError, DataError
from shoal.core.extensions import import_extensions
from shoal.samplers.tiny import TinyEngine, TinyShape
from shoal.train.agent.algorithms.advantages import ESTIMATORS
from shoal.train.agent.algorithms.losses import LOSSES
from shoal.train.agent.batch.packing import BY_MASK
from shoal.train.agent.config import AgentConfig, Algorithm, compose_config
from shoal.train.agent.policies.loading import load_policy, load_teacher, policy_of
from shoal.train.agent.trainer import AgentTrainer
from shoal.train.agent.update import prepare_samples

QUICK = [
    "trainer.iterations=1", "warmup.steps=5", "es_manager.train.env_groups=2", "es_manager.train.group_size=4",
    "es_manager.val.env_groups=2", "trainer.tensorboard=false", "use_parallel_envs=false",
]  # fmt: skip


def test_an_unknown_name_is_an_error_that_names_the_nearest():
    with pytest.raises(ConfigError, match="grpo"):
        compose_config("demo", ["algorithm.adv_estimator=grpoo"])
    with pytest.raises(ConfigError, match="gspo"):
        Algorithm(policy_loss="gsppo")


LESS_MEMORY_OR_A_LOWER_RATE = [
    "algorithm.micro_batch_tokens=64", "algorithm.gradient_checkpointing=true", "algorithm.batching=padded",
    "engine.device=cuda", "engine.threads=2", "agent_proxy.use_parallel_rollout=true", "trainer.keep_checkpoints=1",
    "trainer.iterations=999", "algorithm.learning_rate=0.0001",
]  # fmt: skip
OTHER_RESULTS = [
    "algorithm.gamma=0.5", "algorithm.epochs=2", "engine.width=8", "seed=3", "algorithm.precision=bfloat16",
]  # fmt: skip


@pytest.mark.parametrize("change", [*LESS_MEMORY_OR_A_LOWER_RATE, *OTHER_RESULTS])
def test_a_run_goes_on_with_less_memory_or_a_lower_rate_and_not_with_other_results(change):
    same = read(change).comparable() == AgentConfig().comparable()
    assert same == (change in LESS_MEMORY_OR_A_LOWER_RATE)


def test_a_run_goes_on_for_longer_unless_a_rate_that_falls_over_its_iterations_would_be_another():
    short, long = (read("algorithm.lr_schedule=linear", f"trainer.iterations={n}") for n in (5, 6))
    assert short.comparable() != long.comparable()


OWN = """
import numpy as np
from shoal.train.agent.algorithms.advantages import advantage
from shoal.train.agent.algorithms.losses import PolicyLoss, policy_loss

@advantage("best_of", grouped=True)
def best_of(played):
    best = {}
    for group, value in zip(played.baseline_groups, played.episode_returns, strict=True):
        best[group] = max(best.get(group, -np.inf), value)
    pairs = zip(played.baseline_groups, played.episode_returns)
    return np.array([float(value == best[group]) for group, value in pairs])

@policy_loss("plain")
def plain(tokens, config):
    return PolicyLoss(-tokens.advantages * tokens.logprobs, tokens.logprobs < -99)
"""


def forget(*names):
    for registry in (ESTIMATORS, LOSSES):
        for name in names:
            registry._items.pop(name, None)


@pytest.fixture
def own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    yield tmp_path / "mine.py"
    forget("best_of", "plain")


def test_an_import_that_fails_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=r"broken.py cannot be imported: ZeroDivisionError"):
        compose_config("demo", [f"imports=[{tmp_path / 'broken.py'}]"])
    with pytest.raises(ConfigError, match="no_such_module"):
        AgentConfig.read({"imports": ["no_such_module"]})


def test_the_examples_of_the_page_about_own_parts_train(tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "own-parts.md").read_text()
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "@advantage" in block
    ]
    for part in code.split("\n\n\n")[1:]:
        assert len(part.strip().splitlines()) < 20
    (tmp_path / "mine.py").write_text(code)
    names = ["algorithm.adv_estimator=above_median", "algorithm.policy_loss=unclipped"]
    try:
        mine = f"imports=[{tmp_path / 'mine.py'}]"
        assert len(train(tmp_path / "run", mine, *names, "trainer.iterations=1")) == 2
    finally:
        forget("above_median", "unclipped")


@pytest.mark.slow
def test_a_teacher_is_distilled_into_a_student(tmp_path):
    """The student comes nearer to a teacher that has learned, without any reward."""
    with AgentTrainer(
        compose_config("demo", [*QUICK, "warmup.steps=40", f"run_dir={tmp_path / 'teacher'}"])
    ) as trainer:
        list(trainer.train())
    teacher = tmp_path / "teacher" / "checkpoints" / "step-000001" / "engine"
    settings = [
        "algorithm.adv_estimator=distillation", f"algorithm.teacher={teacher}", "trainer.iterations=4", "seed=3",
        "algorithm.learning_rate=0.01", f"run_dir={tmp_path / 'student'}",
    ]  # fmt: skip
    gaps = []
    with AgentTrainer(compose_config("demo", [*QUICK, "warmup.steps=0", *settings])) as trainer:
        assert not trainer.config.algorithm.filter_groups.enable
        for _ in trainer.train():
            episodes = trainer.evaluate(greedy=False)
            samples = prepare_samples(episodes, trainer._learner)
            gaps.append(float(np.mean([sample.columns["advantages"].mean() for sample in samples])))
    assert gaps[-1] > gaps[0] + 0.5  # minus the reverse KL


def save_tiny(folder, words, width=16, context=256, seed=0):
    folder.mkdir(exist_ok=True)
    policy = policy_of(
        TinyEngine(words, TinyShape(width=width, layers=1, heads=2, context=context), seed=seed)
    )
    policy.save(folder)
    return policy


def distil(folder, *overrides):
    teacher = ["algorithm.adv_estimator=distillation", f"algorithm.teacher={folder / 'teacher'}"]
    return train(folder / "run", *teacher, "warmup.steps=0", "trainer.iterations=1", *overrides)


ACTIONS = ["Down", "Left", "Right", "Up"]


def test_a_run_goes_on_with_the_teacher_that_it_had(tmp_path):
    save_tiny(tmp_path / "teacher", ACTIONS)
    distil(tmp_path)
    save_tiny(tmp_path / "teacher", ACTIONS, seed=1)
    with pytest.raises(DataError, match="teacher_sha256 was '.*' and is '"):
        distil(tmp_path, "trainer.iterations=2", "resume=true")
    save_tiny(tmp_path / "teacher", ACTIONS)
    assert len(distil(tmp_path, "trainer.iterations=2", "resume=true")) == 3


def test_an_episode_that_is_too_long_for_a_teacher_is_named(tmp_path):
    save_tiny(tmp_path / "teacher", ACTIONS, context=22)
    with pytest.raises(
        ConfigError, match=r"an episode has \d+ tokens together, and the teacher reads at most 22"
    ):
        distil(tmp_path)


def test_a_teacher_whose_words_are_others_is_refused(tmp_path):
    """As many words, none of which stands in the text that tokenizers are compared by."""
    student = save_tiny(tmp_path / "student", ["Hoist", "Belay"])
    save_tiny(tmp_path / "larger", ["Hoist", "Belay"], width=32)
    save_tiny(tmp_path / "other", ["Furl", "Reef"])
    save_tiny(tmp_path / "swapped", ["Belay", "Hoist"])
    save_tiny(tmp_path / "fewer", ["Hoist"])
    save_tiny(tmp_path / "more", ["Hoist", "Belay", "Luff"])
    for name in ("student", "larger"):
        load_teacher(str(tmp_path / name), student)
    for name in ("other", "swapped", "fewer", "more"):
        with pytest.raises(ConfigError, match="another vocabulary"):
            load_teacher(str(tmp_path / name), student)


def test_a_folder_without_a_model_says_where_there_is_one(tmp_path):
    with pytest.raises(DataError, match=r"neither config\.json nor engine\.json$"):
        load_policy(tmp_path)
    save_tiny(tmp_path / "engine", ["Up"])
    with pytest.raises(DataError, match="the one of this checkpoint is .*engine"):
        load_policy(tmp_path)


def test_a_teacher_may_have_room_for_more_tokens_than_the_student_has(tmp_path):
    """As Qwen2.5 7B has for 0.5B, whose tokens are the same."""
    write_tiny_model(tmp_path / "small")
    policy, _ = load_policy(tmp_path / "small")
    (tmp_path / "roomy").mkdir()
    policy.module.resize_token_embeddings(policy.module.config.vocab_size + 64)
    policy.save(tmp_path / "roomy")
    small, roomy = (str(tmp_path / name) for name in ("small", "roomy"))
    load_teacher(roomy, load_policy(tmp_path / "small")[0])
    with pytest.raises(ConfigError, match="another vocabulary"):
        load_teacher(small, load_policy(tmp_path / "roomy")[0])


@pytest.mark.parametrize("reads", ["rows of one sample", "rows of several"])
def test_samples_lie_for_a_teacher_as_it_can_read_them(tmp_path, monkeypatch, reads):
    """The student packs its samples, and lets those of a group go on from one prompt; not every network can."""
    teacher = save_tiny(tmp_path / "teacher", ["Up", "Down", "Left", "Right"])
    hidden = teacher.hidden

    def limited(ids, lengths, where, begins=None):
        if reads == "rows of one sample":
            begins = None
        elif begins is not None and begins.ndim == 3:
            begins = begins[0]
        return hidden(ids, lengths, where, begins)

    monkeypatch.setattr(trainer_module, "load_teacher", lambda folder, policy: teacher)
    monkeypatch.setattr(teacher, "hidden", limited)
    sharing = property(lambda self: None if self is teacher else BY_MASK)
    monkeypatch.setattr(type(teacher), "sharing", sharing)
    settings = [
        "algorithm.adv_estimator=distillation",
        "algorithm.teacher=somewhere",
        f"run_dir={tmp_path / 'run'}",
    ]
    found = {}
    for batching in ("packed", "padded"):
        config = compose_config("demo", [*QUICK, *settings, f"algorithm.batching={batching}"])
        with AgentTrainer(config) as trainer:
            episodes = trainer._collector.collect(0, config.agent_proxy.sampling())
            samples = prepare_samples(episodes, trainer._learner)
            found[batching] = np.concatenate([sample.columns["advantages"] for sample in samples])
    np.testing.assert_allclose(found["packed"], found["padded"], atol=1e-5)


# --- imports that fail, come twice, or at once
def test_an_import_that_fails_midway_can_be_tried_again_once_it_is_mended(own):
    own.write_text(OWN + "raise SystemExit(3)\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"mine\.py cannot be imported: SystemExit"):
            import_extensions([str(own)])
    own.write_text(OWN)
    import_extensions([str(own)])
    assert "best_of" in ESTIMATORS


def test_a_file_that_was_changed_is_run_again(tmp_path):
    """In a notebook, whose process lasts."""
    file = tmp_path / "mine.py"
    try:
        for number in (1, 2):
            code = f'@advantage("mine")\ndef mine(played):\n    return {number}\n'
            file.write_text(f"from shoal.train.agent.algorithms.advantages import advantage\n{code}\n")
            import_extensions([str(file)])
            assert ESTIMATORS["mine"].compute(0) == number
    finally:
        forget("mine")


def test_a_file_that_is_imported_twice_is_run_once_and_a_name_that_is_taken_is_refused(own, tmp_path):
    import_extensions([str(own), str(own)])
    import_extensions([str(own)])
    (tmp_path / "other.py").write_text(OWN)
    with pytest.raises(ConfigError, match="'best_of' is registered already"):
        import_extensions([str(tmp_path / "other.py")])


def test_a_thread_that_imports_what_another_one_is_at_waits_until_all_is_registered(own):
    own.write_text(OWN.replace("@advantage", "import time\ntime.sleep(0.3)\n@advantage"))
    with ThreadPoolExecutor(4) as pool:
        known = list(
            pool.map(lambda _: (import_extensions([str(own)]), "best_of" in ESTIMATORS)[1], range(4))
        )
    assert known == [True] * 4


@pytest.mark.parametrize("imports", ["mine.py", [3], 5, True, {"a": 1}])
def test_imports_that_are_no_list_of_names_are_refused(imports):
    with pytest.raises(ConfigError, match="imports must be a list"):
        AgentConfig.read({"imports": imports})


def test_an_installed_package_that_fails_is_named(monkeypatch):
    entry = SimpleNamespace(name="broken", dist=SimpleNamespace(name="their-package"), load=lambda: 1 / 0)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry])
    with pytest.raises(ConfigError, match="'broken' of their-package cannot be imported: ZeroDivisionError"):
        import_extensions([])
