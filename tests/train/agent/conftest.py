"""Models that several tests train, made once."""

import pytest


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """The folder of a model whose tokens are single characters."""
    from tests.train.agent.tiny_model import write_tiny_model

    folder = tmp_path_factory.mktemp("models") / "small"
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The folder of a model whose tokens are bytes, with a long context."""
    from tests.samplers.huggingface.test_huggingface import make_engine

    folder, engine = tmp_path_factory.mktemp("base"), make_engine()
    engine.model.config.max_position_embeddings = 2000
    engine.model.save_pretrained(folder)
    engine.tokenizer.tokenizer.save_pretrained(folder)
    return folder
