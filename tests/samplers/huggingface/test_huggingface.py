from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.rollout.doubles import TEMPLATE, byte_tokenizer, llama_engine
from tests.rollout.doubles import llama_requests as requests
from tests.samplers.definitions import by_definition, check_answers
from transformers import AutoModelForCausalLM, GPTNeoConfig, MambaConfig, MptConfig, Qwen3NextConfig

from shoal.core.errors import ConfigError, DataError, EngineError
from shoal.samplers.huggingface import caches
from shoal.samplers.huggingface.engine import HuggingFaceEngine
from shoal.samplers.sampler import Key, Request, Sampling
from shoal.samplers.tiny import TinyEngine, TinyShape
from shoal.train.agent.policies.loading import policy_of

FORGETFUL = (  # like templates that strip the thoughts of earlier turns
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role != 'assistant' or loop.last %}{{ m.content }}{% else %}…{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_engine(template=TEMPLATE, **settings):
    return llama_engine(byte_tokenizer(template), **settings)


@pytest.fixture(scope="module")
def engine():
    return make_engine(max_batch=7)


def test_a_template_that_rewrites_earlier_turns_is_named_with_the_place():
    engine = make_engine(FORGETFUL)
    with pytest.raises(EngineError, match=r"not append-only.*'…"):
        engine.tokenizer.extend((5,), {"role": "user", "content": "b"})


def test_only_the_last_layers_train_when_asked():
    engine = make_engine()
    policy_of(engine).freeze_all_but_last(1)
    trained = {name for name, parameter in engine.model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(name.startswith(("model.layers.2.", "model.norm")) for name in trained)
    with pytest.raises(ConfigError, match=r"in \[1, 3\], got 4"):
        policy_of(engine).freeze_all_but_last(4)
    other = AutoModelForCausalLM.from_config(OTHER_LAYERS["a window over places"]())
    with pytest.raises(ConfigError, match="train_last_layers=1 needs a model whose decoder has `layers`"):
        policy_of(HuggingFaceEngine(other, byte_tokenizer())).freeze_all_but_last(1)


def test_an_engine_survives_the_disk(engine, tmp_path):
    policy_of(engine).save(tmp_path)
    again = HuggingFaceEngine.load(tmp_path)
    asked = requests(engine, 6)
    assert [c.token_ids for c in again.generate(asked)] == [c.token_ids for c in engine.generate(asked)]
    with pytest.raises(DataError, match=r"no config\.json"):
        HuggingFaceEngine.load(tmp_path / "nothing")


def play_turns(engine, n_turns=4, mode="append", seed=0):
    """Episodes of several turns, as a rollout asks for them; what was asked and what was written."""
    rng, tokenizer = np.random.default_rng(seed), engine.tokenizer
    contexts = {(g, m): () for g in range(3) for m in range(2)}
    asked, answers = [], []
    for turn in range(n_turns):
        batch = []
        for (g, m), before in contexts.items():
            text = f"rules {turn} " + "x" * int(rng.integers(0, 5) if turn else g)
            message = {"role": "user", "content": text}
            fresh = mode == "window" or not before
            prompt = tokenizer.start([message]) if fresh else before + tokenizer.extend(before, message)
            batch.append(Request(prompt, Key(seed, (0, g, m, turn)), Sampling(1 + (g + turn) % 5)))
        completions = engine.generate(batch)
        for request, completion in zip(batch, completions, strict=True):
            place = request.key.path[1:3]
            contexts[place] = request.prompt_ids + completion.token_ids
        asked += batch
        answers += completions
    return asked, answers


@pytest.mark.parametrize("mode", ["append", "window"])
@pytest.mark.parametrize("max_batch", [1, 4, 32])
def test_turns_that_start_from_known_prefixes_are_written_as_the_definition_says(mode, max_batch):
    engine = make_engine(max_batch=max_batch)
    check_answers(engine, *play_turns(engine, mode=mode))
    share = engine.computed_tokens / engine.prompt_tokens
    assert share < (0.6 if mode == "append" else 0.95)


SHAPE = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
OTHER_LAYERS = {
    "a window over places": lambda: GPTNeoConfig(
        vocab_size=258, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=24, max_position_embeddings=256,
    ),
    "a penalty by the distance of places": lambda: MptConfig(vocab_size=258, d_model=32, n_layers=2, n_heads=4),
    "states in the place of keys and values": lambda: Qwen3NextConfig(
        **SHAPE, **HEADS, linear_num_key_heads=2, linear_num_value_heads=2, num_experts=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER_LAYERS)
def test_models_with_other_layers_do_not_go_on_from_what_has_a_gap_behind_it(kind):
    config = OTHER_LAYERS[kind]()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    engine = HuggingFaceEngine(model, byte_tokenizer())
    begin = tuple(range(40, 80))
    asked = [
        Request(begin + tuple(range(100, 100 + n)), Key(0, (0, n, 0, 0)), Sampling(4)) for n in (1, 30, 12)
    ]
    check_answers(engine, asked, engine.generate(asked), atol=1e-4)


def test_without_a_store_every_token_is_computed_and_the_same_is_written():
    engine, plain = make_engine(), make_engine(prefix_tokens=0)
    asked, answers = play_turns(engine)
    asked_plain, answers_plain = play_turns(plain)
    assert asked == asked_plain
    assert [c.token_ids for c in answers] == [c.token_ids for c in answers_plain]
    assert plain.computed_tokens == plain.prompt_tokens == engine.prompt_tokens
    plain.generate(asked_plain[:6])
    assert plain.computed_tokens == plain.prompt_tokens > engine.prompt_tokens
    assert plain.prefixes.tokens == 0


@pytest.mark.parametrize("how", ["by an optimizer", "in place", "by name"])
def test_nothing_computed_with_other_weights_is_used(how):
    engine = make_engine()
    play_turns(engine)
    weight = engine.model.model.layers[0].self_attn.v_proj.weight
    if how == "by an optimizer":
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=0.1, fused=True).step()
    elif how == "in place":
        with torch.no_grad():
            weight.mul_(-2.0)
    else:
        state = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
        state["model.layers.0.self_attn.v_proj.weight"] *= -2.0
        engine.load_weights(state, 1)
    check_answers(engine, *play_turns(engine, n_turns=2))


def test_what_is_kept_of_contexts_and_scores_has_a_limit(monkeypatch):
    """Those that were used last stay, and what was given up is computed again."""
    monkeypatch.setattr(caches, "MOST_SCORES", 258 * 40)
    engine = make_engine(prefix_tokens=150)
    for mode in ("append", "window"):
        check_answers(engine, *play_turns(engine, mode=mode))
        assert 0 < engine.prefixes.tokens <= 150
        assert 0 < len(engine.prefixes._scores) <= 40


def test_contexts_that_were_computed_for_others_are_not_computed_again():
    engine = make_engine(max_batch=5)
    prompts = [request.prompt_ids for request in requests(engine, 12)]

    def asked(member, max_tokens, temperature=1.0, **more):
        sampling = Sampling(max_tokens, temperature, **more)
        return [Request(p, Key(0, (0, group, member, 0)), sampling) for group, p in enumerate(prompts)]

    def check(batch):
        check_answers(engine, batch, engine.generate(batch))

    check(asked(0, 6))
    before = engine.computed_tokens, engine.decoded_tokens
    check(asked(0, 6))
    check(asked(1, 1))
    check(asked(2, 1, 0.5))
    assert (engine.computed_tokens, engine.decoded_tokens) == before
    engine.generate(asked(3, 1, top_p=0.7))
    assert (engine.computed_tokens, engine.decoded_tokens) == before
    check(asked(4, 6, 0.0))  # goes on where what is known ends
    distinct = len(set(prompts))
    assert before[0] < engine.computed_tokens <= before[0] + 2 * distinct
    check(asked(5, 6, 0.4))


def test_a_prompt_goes_on_from_what_any_episode_began_with():
    engine = make_engine()
    first = tuple(range(60, 90))
    engine.generate([Request(first, Key(0, (0, 0, 0, 0)), Sampling(1))])
    request = Request((*first[:20], 5, 6, 7), Key(0, (0, 1, 0, 0)), Sampling(4))
    check_answers(engine, [request], engine.generate([request]))
    assert engine.computed_tokens == len(first) + 3


@pytest.mark.parametrize("make", [make_engine, lambda: TinyEngine(("Up",), TinyShape(16, 1, 2))])
@pytest.mark.parametrize("wrong", ["another shape", "an unknown name", "one too few"])
def test_weights_of_another_network_leave_all_as_it_was(make, wrong):
    """They were put in place up to the one that did not fit, under the version of the old ones."""
    engine = make()
    own = engine.model.state_dict()
    before = {name: value.clone() for name, value in own.items()}
    given = {name: torch.zeros_like(value) for name, value in own.items()}
    if wrong == "another shape":
        given[list(own)[-2]] = torch.zeros(3)
    elif wrong == "an unknown name":
        given["x"] = torch.zeros(3)
    else:
        del given["model.norm.weight" if make is make_engine else list(own)[-1]]
    with pytest.raises(DataError, match="weights are of another network"):
        engine.load_weights(given, 7)
    assert engine.weights_version == 0
    assert all(torch.equal(value, before[name]) for name, value in engine.model.state_dict().items())


def test_one_of_tied_weights_is_enough():
    engine = make_engine()
    given = {name: value + 1 for name, value in engine.model.state_dict().items()}
    head = given.pop("lm_head.weight")
    engine.load_weights(given, 7)
    assert torch.equal(engine.model.lm_head.weight, head)


def test_a_token_that_the_network_does_not_know_is_named():
    """`IndexError: index out of range in self`; on a GPU nothing would work any more after it."""
    tokenizer = byte_tokenizer()
    small = make_engine().model
    tokenizer.add_tokens(["lamp"])
    engine = HuggingFaceEngine(small, tokenizer)
    prompt = engine.tokenizer.start([{"role": "user", "content": "a lamp"}])
    with pytest.raises(EngineError, match=r"has token 258, and the network knows 258: its tokenizer"):
        engine.generate([Request(prompt, Key(0, (0, 0, 0, 0)), Sampling(2))])


def test_a_network_without_keys_and_values_is_refused_by_name(engine):
    config = MambaConfig(vocab_size=258, hidden_size=32, num_hidden_layers=2, state_size=4)
    states = HuggingFaceEngine(AutoModelForCausalLM.from_config(config), byte_tokenizer())
    with pytest.raises(EngineError, match="MambaForCausalLM keeps a state in the place of keys and values"):
        states.generate(requests(engine, 1))


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no roles') }}{% endif %}" + TEMPLATE, "no roles"),
        ("{% if messages[0].role == 'system' %}{{ strftime_later('x') }}{% endif %}" + TEMPLATE, "strftime_later"),
    ],
)  # fmt: skip
def test_a_template_that_refuses_a_chat_is_an_engine_error_that_names_its_roles(template, told):
    engine = make_engine(template)
    with pytest.raises(EngineError, match=f"refuses a chat of system, user .*{told}.*without the role"):
        engine.tokenizer.start([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    with pytest.raises(EngineError, match="refuses a chat of user .*unexpected end|Unexpected end"):
        make_engine("{% for m in messages %}")


def with_adapter(folder):
    """A network with a LoRA adapter, which is written into a folder too."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(make_engine().model, lora)
    adapted.save_pretrained(folder)
    return adapted


of_peft = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
"""What peft 0.21 says on transformers 5.23."""


@of_peft
def test_an_adapter_is_swapped_in_and_replaced_also_by_whole_weights(tmp_path):
    request = requests(make_engine(), 1)[0]
    plain = by_definition(make_engine(), request)[1]
    engine, seen = make_engine(), []
    for number in (1, 2):
        donor = with_adapter(tmp_path / str(number))
        engine.load_adapter(tmp_path / str(number), number)
        completion = engine.generate([request])[0]
        assert completion.weights_version == number
        merged = make_engine()
        merged.model = donor.merge_and_unload().eval()
        written, logprobs = by_definition(merged, request)
        assert completion.token_ids == written
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)
        seen.append(logprobs[0])
    assert len({*seen, plain[0]}) == 3
    for version in (3, 4):  # of a network without adapters, one of which is in the way at first
        engine.load_weights(make_engine().model.state_dict(), version)
        completion = engine.generate([request])[0]
        assert completion.weights_version == version
        np.testing.assert_allclose(completion.logprobs, plain, atol=1e-4)
    engine.load_adapter(tmp_path / "2", 5)
    np.testing.assert_allclose(engine.generate([request])[0].logprobs, logprobs, atol=1e-4)
    with pytest.raises(DataError, match=r"no adapter_model\.safetensors"):
        engine.load_adapter(tmp_path, 3)


def spoil(folder, how):
    weights = load_file(folder / "adapter_model.safetensors")
    kept = {
        "other names": {name.replace("layers", "blocks"): value for name, value in weights.items()},
        "half": {name: value for name, value in weights.items() if "lora_A" in name},
        "other shapes": {
            name: torch.cat([value] * 2) if "lora_B" in name else value for name, value in weights.items()
        },
    }.get(how, weights)
    save_file(kept, folder / "adapter_model.safetensors")
    if how == "cut off":
        data = (folder / "adapter_model.safetensors").read_bytes()
        (folder / "adapter_model.safetensors").write_bytes(data[:-9])


@of_peft
@pytest.mark.parametrize("how", ["other names", "half", "other shapes", "cut off"])
def test_an_adapter_that_does_not_fit_is_refused_and_the_one_before_stays(tmp_path, how):
    """Its weights were drawn by lot and played; or it was refused when the one before was gone already."""
    for name in ("first", "second"):
        with_adapter(tmp_path / name)
    engine = make_engine(prefix_tokens=0)
    asked = requests(engine, 3)
    engine.load_adapter(tmp_path / "first", 1)
    before = engine.generate(asked)
    spoil(tmp_path / "second", how)
    with pytest.raises(DataError, match="second does not load as an adapter of this model"):
        engine.load_adapter(tmp_path / "second", 2)
    assert engine.generate(asked) == before


@pytest.mark.slow
def test_smollm2_is_fetched_converted_and_speaks(tmp_path, monkeypatch):
    from shoal.samplers.models import get_model, resolve_model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    get_model("smollm2")
    real = HuggingFaceEngine.load(resolve_model("smollm2"))
    prompt = real.tokenizer.start([{"role": "user", "content": "What is the capital of France?"}])
    said = real.generate([Request(prompt, Key(0, (0, 0, 0, 0)), Sampling(12, 0.0))])[0]
    assert "Paris" in real.tokenizer.decode(said.token_ids)


def test_threads_that_ask_at_once_get_what_one_gets():
    """What is kept of episodes is found, gone on from and replaced by one call at a time."""
    alone, shared = make_engine(prefix_tokens=2000), make_engine(prefix_tokens=2000)
    start = alone.tokenizer.start
    asked = [
        Request(start([{"role": "user", "content": "look " * turn}]), Key(0, (0, n, 0, turn)), Sampling(4))
        for turn in range(1, 5)
        for n in range(8)
    ]
    right = [alone.generate([request])[0].token_ids for request in asked]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda request: shared.generate([request])[0].token_ids, asked))
    assert found == right
    assert shared.prefixes.tokens == sum(map(len, shared.prefixes._entries))
