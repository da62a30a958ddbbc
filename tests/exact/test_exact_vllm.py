"""A real vLLM returns the trainer's log-probabilities, bit for bit."""

import pytest
import torch

from primeblocks.errors import PlanError
from primeblocks.testing import tiny_models
from tests.engine_job import KV_BYTES, call

pytestmark = pytest.mark.vllm


def _engine(folder, dtype, **more):
    from vllm import LLM

    from primeblocks.exact.adapters.vllm import ARCHITECTURE

    options = {
        "hf_overrides": ARCHITECTURE, "enforce_eager": True, "dtype": dtype,
        "skip_tokenizer_init": True, "max_model_len": 192, "kv_cache_memory_bytes": KV_BYTES,
        # Long prompts come in pieces, and requests in batches of all sizes.
        "max_num_seqs": 12, "max_num_batched_tokens": 48, "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    return LLM(model=folder, **options | more)


def _sampled(engine, prompts, temperature, tokens=24):
    """The tokens of each answer, and their log-probabilities as the engine said them."""
    from vllm import SamplingParams

    settings = SamplingParams(
        max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False, temperature=temperature
    )
    answers = engine.generate(
        [{"prompt_token_ids": each} for each in prompts], settings, use_tqdm=False
    )
    for answer in answers:
        said = answer.outputs[0]
        yield (
            list(said.token_ids),
            [each[t].logprob for t, each in zip(said.token_ids, said.logprobs, strict=True)],
        )


def _trained(model, prompt, answer, temperature):
    from primeblocks.exact import batch_invariant

    ids = torch.tensor([prompt + answer])
    with torch.no_grad(), batch_invariant():
        logits = model(input_ids=ids, use_cache=False).logits
        scores = (logits.float() / temperature).log_softmax(-1)
    return scores[0, len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0]


def _compare(folder, dtype, temperature, then):
    """Compare tokens before and after an update. Also return what `then` finds on this engine."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    engine = _engine(folder, dtype)
    draw = torch.Generator().manual_seed(7)
    lengths = torch.randint(2, 100, (20,), generator=draw).tolist()
    prompts = [torch.randint(4, 512, (n,), generator=draw).tolist() for n in lengths]
    prompts += [prompts[0][:40] + each for each in prompts[1:4]]  # With a prefix in common.
    different, tokens = [], 0
    for step in range(2):
        if step:
            _train(model, engine)
        sampled = _sampled(engine, prompts, temperature)
        for prompt, (answer, said) in zip(prompts, sampled, strict=True):
            found = _trained(model, prompt, answer, temperature)
            tokens += len(answer)
            different += (found != torch.tensor(said)).nonzero()[:, 0].tolist()
    return (tokens, different), then(model, engine)


def _train(model, engine):
    """Change all weights, and give the engine the new ones."""
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1.01)
    weights = model.state_dict()

    def load(held):
        held.load_weights(weights.items())

    engine.apply_model(load)
    engine.reset_prefix_cache()


def _traced(model, engine):
    """What differs between engine and trainer, right and with one element changed in the engine."""
    from primeblocks.exact import Trace, first_difference

    prompt, found = list(range(5, 35)), []
    with Trace(model) as mine:
        _trained(model, prompt[:-1], prompt[-1:], 1.0)

    def change(module, args, output):
        output = output.clone()
        output.view(-1)[3] += 1.0
        return output

    for wrong in (None, "model.layers.1.mlp.experts"):
        traces = []

        def start(held, wrong=wrong, traces=traces):
            if wrong is not None:
                held.get_submodule(wrong).register_forward_hook(change)
            traces.append(Trace(held))

        engine.apply_model(start)
        engine.reset_prefix_cache()
        list(_sampled(engine, [prompt], 0.0, tokens=1))
        found.append(first_difference(mine, traces[0].stop()))
    return found


def _refused(model, engine):
    """What the loader says of tensors that do not fit."""
    wrong = []

    def load(held):
        for name, tensor in [("lm_head.bias", torch.ones(3)), ("lm_head.weight", torch.ones(1))]:
            with pytest.raises(PlanError, match="lm_head") as odd:
                held.load_weights([(name, tensor)])
            wrong.append(str(odd.value))

    engine.apply_model(load)
    return wrong


def _run(tmp_path_factory, family, dtype, temperature, then):
    folder = tmp_path_factory.mktemp("exact") / family
    tiny_models.save(family, folder, num_layers=2, hidden=64, init_std=0.2, dtype=dtype)
    return call(_compare, str(folder), dtype, temperature, then)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return _run(tmp_path_factory, "qwen3_moe", "bfloat16", 0.7, _traced)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return _run(tmp_path_factory, "qwen3", "float32", 1.0, _refused)


@pytest.mark.parametrize("engine", ["moe", "dense"])
def test_every_log_probability_is_the_trainers_to_the_bit(engine, request):
    compared, _ = request.getfixturevalue(engine)
    assert compared == (2 * 23 * 24, [])


def test_an_element_that_one_layer_of_the_engine_has_otherwise_is_found(moe):
    right, wrong = moe[1]
    assert right is None
    assert (wrong.module, wrong.side, wrong.rows) == ("model.layers.1.mlp.experts", "output", 1)


def _compiled(folder):
    with pytest.raises(Exception, match="enforce_eager") as error:  # vLLM's own, of ours.
        _engine(folder, "float32", enforce_eager=False)
    return str(error.value)


def test_what_cannot_be_exact_is_refused(dense, tmp_path):
    folder = tiny_models.save("qwen3", tmp_path / "tiny", num_layers=1, hidden=64)
    assert "cannot be exact" in call(_compiled, str(folder))
    bias, weight = dense[1]
    assert "no such name" in bias
    assert "(512, 64)" in weight
