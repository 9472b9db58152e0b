"""A name means its paper: what presets set, what counts more, and what follows from the engine or the prompt."""

from importlib import resources

import pytest
import yaml

from shoal.cli.main import main
from shoal.core.configuration import to_mapping
from shoal.core.errors import ConfigError
from shoal.rollout.prompts import PromptConfig
from shoal.samplers.registry import EngineConfig, ReplicaConfig
from shoal.train.agent.algorithms.presets import FOLLOWS, leaves, preset_names
from shoal.train.agent.config import (
    AgentConfig,
    AgentProxy,
    Algorithm,
    FilterGroups,
    compose_config,
    config_names,
)

NAMES = [
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce",
    "reinforce_pp",
    "gigpo",
    "maxrl",
    "ppo",
]


def at(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


def file_of(name):
    return yaml.safe_load(
        resources.files("shoal.configs").joinpath("algorithm", f"{name}.yaml").read_text("utf-8")
    )


def test_these_presets_come_with_shoal():
    assert preset_names() == sorted(NAMES)


def test_what_is_left_out_is_grpo():
    wanted = dict(leaves(file_of("grpo")))
    wanted["algorithm.filter_groups.enable"] = False
    config = AgentConfig()
    assert {path: at(config, path) for path in wanted} == wanted


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_on_the_command_line_counts_more_than_the_config_and_less_than_a_single_setting(name):
    own = {path: value for path, value in leaves({k: v for k, v in file_of(name).items() if k != "defaults"})}
    wanted = dict(leaves(file_of("grpo"))) | own
    wanted["algorithm.filter_groups.enable"] = name == "dapo"
    for config in ("demo", "mixed"):  # of which the second is PPO with changes of its own
        found = compose_config(config, [f"algorithm={name}", "algorithm.epochs=3"])
        assert {path: at(found, path) for path in wanted} == wanted | {"algorithm.epochs": 3}
    assert found.algorithm.learning_rate == 0.001  # of the config, since no preset has one
    assert compose_config("demo", ["algorithm.epochs=3", f"algorithm={name}"]).algorithm.epochs == 3


def test_an_estimator_alone_is_chosen_as_before():
    plain = to_mapping(compose_config("demo"))
    plain["algorithm"]["adv_estimator"] = "rloo"
    assert to_mapping(compose_config("demo", ["algorithm.adv_estimator=rloo"])) == plain


def test_an_unknown_preset_is_an_error_that_names_the_nearest():
    with pytest.raises(ConfigError, match="no algorithm preset named 'dappo'. Did you mean 'dapo'"):
        compose_config("demo", ["algorithm=dappo"])
    with pytest.raises(ConfigError, match="one preset at a time"):
        compose_config("demo", ["algorithm=dapo", "algorithm=grpo"])


def test_a_preset_of_the_user_stands_beside_those_of_shoal(tmp_path):
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [dapo, _self_]\nalgorithm: {clip_ratio_low: 0.1}\n"
    )
    (tmp_path / "lake.yaml").write_text("defaults: [demo, _self_]\nalgorithm: {clip_ratio_low: 0.3}\n")
    (tmp_path / "own.yaml").write_text("defaults: [{algorithm: mine}, _self_]\nseed: 3\n")
    for found in (compose_config("lake", ["algorithm=mine"], tmp_path), compose_config("own", [], tmp_path)):
        algorithm = found.algorithm
        assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.overlong_filter) == (
            0.1,
            0.28,
            True,
        )


@pytest.mark.parametrize("name", config_names())
def test_a_shipped_config_is_its_preset_but_for_what_its_files_say(name):
    """Every departure stands in the YAML that the user reads, with its reason behind it or above."""
    said, preset, todo = {}, None, [name]
    while todo:
        text = resources.files("shoal.configs").joinpath(f"{todo[0]}.yaml").read_text("utf-8")
        values = yaml.safe_load(text)
        chosen = [next(iter(one.values())) for one in values.pop("defaults", []) if isinstance(one, dict)]
        preset = preset or next(iter(chosen), None)
        for path, value in leaves(values):
            said.setdefault(path, value)
        parents = yaml.safe_load(text).get("defaults", [])
        todo = [one for one in parents if isinstance(one, str) and one != "_self_"]
    own = {k: v for k, v in file_of(preset or "grpo").items() if k != "defaults"}
    wanted = dict(leaves(file_of("grpo"))) | dict(leaves(own))
    wanted["algorithm.filter_groups.enable"] = False
    config = compose_config(name)
    assert {path: at(config, path) for path in wanted} == {
        path: said.get(path, value) for path, value in wanted.items()
    }


# --- what follows from other settings
def test_a_dataclass_and_the_equal_mapping_are_one_config():
    model = {"name": "huggingface", "model": "m"}
    pairs = [
        (AgentConfig(), {}),
        (AgentConfig(engine=EngineConfig(**model)), {"engine": model}),
        (AgentConfig(engine=EngineConfig(name="openai")), {"engine": {"name": "openai"}}),
        (
            AgentConfig(engine=EngineConfig(name="ray", replicas=ReplicaConfig(engine="tiny"))),
            {"engine": {"name": "ray", "replicas": {"engine": "tiny"}}},
        ),
        (
            AgentConfig(
                agent_proxy=AgentProxy(tools=("json:loads",), prompt=PromptConfig(prefill="<", closing=">"))
            ),
            {"agent_proxy": {"tools": ["json:loads"], "prompt": {"prefill": "<", "closing": ">"}}},
        ),
        (
            AgentConfig(algorithm=Algorithm(filter_groups=FilterGroups(max_num_gen_batches=3))),
            {"algorithm": {"filter_groups": {"max_num_gen_batches": 3}}},
        ),
    ]
    for made, mapping in pairs:
        assert made == AgentConfig.read(mapping)


def test_the_rates_of_a_pretrained_model_are_lower_and_one_that_is_given_stays():
    pretrained = AgentConfig(engine=EngineConfig(name="huggingface", model="m")).algorithm
    assert (pretrained.learning_rate, pretrained.critic.learning_rate) == (1e-5, 1e-5)
    assert AgentConfig().algorithm.rates == (1e-3, 1e-3)
    assert compose_config("smollm2", ["algorithm.learning_rate=0.001"]).algorithm.learning_rate == 0.001
    with pytest.raises(ConfigError, match="learning_rate=auto follows from the engine"):
        _ = Algorithm().rates


@pytest.mark.parametrize("words", [["agent_proxy.prompt.mode=append"], ["agent_proxy.tools=['json:loads']"]])
@pytest.mark.parametrize("name", ["base", "smollm2"])
def test_a_prefill_is_dropped_where_an_answer_is_the_models_own(name, words):
    assert compose_config(name).agent_proxy.prompt.prefill == "<action>"
    prompt = compose_config(name, words).agent_proxy.prompt
    assert (prompt.prefill, prompt.closing) == ("", "")
    if prompt.mode == "append":
        assert prompt.later == "{observation}"


def test_what_another_setting_decided_is_printed_with_its_reason(capsys):
    changed = ["agent_proxy.prompt.mode=append", "algorithm.learning_rate=auto"]
    assert main(["train", "--config-name", "smollm2", *changed, "--cfg"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for setting, reason in (
        ("learning_rate: 1.0e-05", "auto: 0.00001 for a pretrained model"),
        ("prefill: ''", "none: with mode append"),
    ):
        above = " ".join(lines[lines.index(setting) - 3 : lines.index(setting)])
        assert reason in above
    # of the two rates of a tiny model
    assert len({follows.reason for follows in FOLLOWS}) == len(FOLLOWS) - 1
