"""A real vLLM returns the trainer's log-probabilities, bit for bit."""

from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch

from primeblocks.errors import PlanError
from primeblocks.testing import tiny_models
from tests.engine_job import KV_BYTES, call

pytestmark = pytest.mark.vllm


class Size(NamedTuple):
    rounds: tuple[int, ...]  # requests; every round but the first begins with new weights
    tokens: int  # of the longest answer
    requests: int  # in a batch
    pages: int  # of 32 keys; too few for the answers of such a batch


NORMAL = Size((2, 12, 8, 12, 4, 4), tokens=30, requests=12, pages=14)
FULL = Size((1, 64, 8, 64, 16, 32), tokens=74, requests=64, pages=98)


def _engine(folder, dtype, size=NORMAL, **more):
    from vllm import LLM

    from primeblocks.exact.adapters.vllm import ARCHITECTURE

    options = {
        "hf_overrides": ARCHITECTURE, "enforce_eager": True, "dtype": dtype,
        "skip_tokenizer_init": True, "max_model_len": 192, "kv_cache_memory_bytes": KV_BYTES,
        "block_size": 32, "num_gpu_blocks_override": size.pages, "enable_prefix_caching": True,
        # Long prompts come in pieces, and requests in batches of all sizes.
        "max_num_seqs": size.requests, "max_num_batched_tokens": max(48, size.requests + 16),
        "logprobs_mode": "processed_logprobs", "disable_log_stats": False,
    }  # fmt: skip
    return LLM(model=folder, **options | more)


def _requests(count, most, is_long, draw):
    """Prompts, some with a prefix in common if they are long, and the lengths of their answers."""

    def ids(least, below):
        length = int(torch.randint(least, below, (), generator=draw))
        return torch.randint(4, 512, (length,), generator=draw).tolist()

    shared = ids(40, 41)
    long = [shared + ids(1, 60) if at % 3 == 0 else ids(2, 100) for at in range(count)]
    prompts = long if is_long else [ids(2, 12) for _ in range(count)]
    return prompts, torch.randint(most // 2, most + 1, (count,), generator=draw).tolist()


def _sampled(engine, prompts, lengths, temperature):
    """The tokens of each answer, and their log-probabilities as the engine said them."""
    from vllm import SamplingParams

    plain = {"logprobs": 0, "ignore_eos": True, "detokenize": False, "temperature": temperature}
    settings = [SamplingParams(max_tokens=each, **plain) for each in lengths]
    answers = engine.generate(
        [{"prompt_token_ids": each} for each in prompts], settings, use_tqdm=False
    )
    for answer in answers:
        said = answer.outputs[0]
        yield (
            list(said.token_ids),
            [each[t].logprob for t, each in zip(said.token_ids, said.logprobs, strict=True)],
        )


def _trained(model, prompt, answer, temperature, is_exact=True):
    from primeblocks.exact import batch_invariant

    ids = torch.tensor([prompt + answer])
    with torch.no_grad(), batch_invariant() if is_exact else nullcontext():
        logits = model(input_ids=ids, use_cache=False).logits
        scores = (logits.float() / temperature).log_softmax(-1)
    return scores[0, len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0]


def _pairs(model, engine, prompts, lengths, temperature, is_exact=True):
    """The log-probabilities of each answer, by the trainer and by the engine."""
    sampled = _sampled(engine, prompts, lengths, temperature)
    return [
        (_trained(model, prompt, answer, temperature, is_exact), torch.tensor(said))
        for prompt, (answer, said) in zip(prompts, sampled, strict=True)
    ]


def _prompts(model, engine, prompts):
    """The log-probabilities of each prompt, by the trainer and by the engine."""
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
    return [
        (
            _trained(model, prompt[:1], prompt[1:], 1.0),
            torch.tensor([each[t].logprob for t, each in zip(prompt[1:], said[1:], strict=True)]),
        )
        for prompt, said in zip(prompts, (a.prompt_logprobs for a in answers), strict=True)
    ]


def _compare(folder, dtype, temperature, size, then=None):
    """Compare tokens, with one version of the weights a round. Also return what `then` finds.

    Without `then`, both sides run as they do without `exact`, and no weights change.
    """
    from transformers import AutoModelForCausalLM

    from primeblocks.replay import measure_mismatch

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    engine = _engine(folder, dtype, size, **{} if then else {"hf_overrides": {}})
    batches = set()

    def note(held):
        held.lm_head.register_forward_pre_hook(lambda _, rows: batches.add(len(rows[0])))

    engine.apply_model(note)
    draw = torch.Generator().manual_seed(7)
    pairs, expected = [], 0
    for step, count in enumerate(size.rounds):
        if step and then:
            _train(model, engine)
        prompts, lengths = _requests(count, size.tokens, step % 2 == 0, draw)
        expected += sum(lengths)
        pairs += _pairs(model, engine, prompts, lengths, temperature, bool(then))
    if then:
        pairs += _prompts(model, engine, [list(range(5, n)) for n in (7, 90)])
        expected += 1 + 84
    ours, theirs = map(torch.cat, zip(*pairs, strict=True))
    counted = {each.name: getattr(each, "value", None) for each in engine.get_metrics()}
    found = {
        "tokens": len(ours),
        "expected": expected,
        "different": int((ours != theirs).sum()),
        "k3": measure_mismatch(trainer_logprobs=ours, rollout_logprobs=theirs).k3,
        "batches": batches,
        "preempted": counted["vllm:num_preemptions"],
        "from the prefix cache": counted["vllm:prefix_cache_hits"],
    }
    return found, then and then(model, engine)


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


def _traced_and_fp8(model, engine):
    return _traced(model, engine), _fp8(model, engine)


def _fp8(model, engine):
    """Whether each answer agrees if both sides multiply in simulated FP8, experts too."""
    from primeblocks.fp8 import Recipe
    from primeblocks.fp8.adapters.transformers import convert
    from primeblocks.fp8.reference import SimulatedGemm

    def change(held):
        return len(convert(held, Recipe(gemm=SimulatedGemm()), only=r"self_attn\..*|mlp\.experts"))

    prompts = [list(range(5, n)) for n in (7, 40, 90)]
    before = _pairs(model, engine, prompts, [20] * 3, 1.0)[0][0]
    assert engine.apply_model(change) == [change(model)]
    engine.reset_prefix_cache()
    pairs = _pairs(model, engine, prompts, [20] * 3, 1.0)
    return not torch.equal(pairs[0][0], before), [torch.equal(*pair) for pair in pairs]


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
        traces, changes = [], []

        def start(held, wrong=wrong, traces=traces, changes=changes):
            if wrong is not None:
                changes.append(held.get_submodule(wrong).register_forward_hook(change))
            traces.append(Trace(held))

        engine.apply_model(start)
        engine.reset_prefix_cache()
        list(_sampled(engine, [prompt], [1], 0.0))
        found.append(first_difference(mine, traces[0].stop()))
        for each in changes:
            each.remove()
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


def _run(request, tmp_path_factory, family, dtype, temperature, then):
    folder = tmp_path_factory.mktemp("exact") / family
    tiny_models.save(family, folder, num_layers=2, hidden=64, init_std=0.2, dtype=dtype)
    size = FULL if request.config.getoption("--full") else NORMAL
    return size, *call(_compare, str(folder), dtype, temperature, size, then)


@pytest.fixture(scope="module")
def moe(request, tmp_path_factory):
    return _run(request, tmp_path_factory, "qwen3_moe", "bfloat16", 0.7, _traced_and_fp8)


@pytest.fixture(scope="module")
def dense(request, tmp_path_factory):
    return _run(request, tmp_path_factory, "qwen3", "float32", 1.0, _refused)


@pytest.mark.parametrize("engine", ["moe", "dense"])
def test_every_log_probability_is_the_trainers_to_the_bit(engine, request):
    size, found, _ = request.getfixturevalue(engine)
    assert found["tokens"] == found["expected"] >= (10_000 if size is FULL else 800)
    assert (found["different"], found["k3"]) == (0, 0.0)
    assert {1, size.requests} <= found["batches"]
    assert found["preempted"] > 0
    assert found["from the prefix cache"] > 0


def test_without_the_switch_most_log_probabilities_differ(full, tmp_path):
    if not full:
        pytest.skip("shows that the tests above can fail; runs with --full")
    folder = tmp_path / "tiny"
    tiny_models.save("qwen3_moe", folder, num_layers=2, hidden=64, init_std=0.2, dtype="bfloat16")
    found, _ = call(_compare, str(folder), "bfloat16", 0.7, FULL)
    assert found["different"] > found["tokens"] / 2


def test_an_element_that_one_layer_of_the_engine_has_otherwise_is_found(moe):
    (right, wrong), _ = moe[2]
    assert right is None
    assert (wrong.module, wrong.side, wrong.rows) == ("model.layers.1.mlp.experts", "output", 1)


def test_fp8_that_both_sides_simulate_agrees_to_the_bit(moe):
    _, (is_other, agree) = moe[2]
    assert is_other  # FP8 changed the numbers.
    assert agree == [True] * 3


ODD = {
    "enforce_eager": {"enforce_eager": False},
    "send merged weights": {"enable_lora": True},
    "leave out enable_return_routed_experts": {"enable_return_routed_experts": True},
}


def _odd(folder):
    for remedy, options in ODD.items():
        with pytest.raises(Exception, match=remedy) as error:  # vLLM's own, of ours.
            _engine(folder, "float32", **options)
        assert "cannot be exact" in str(error.value)


def test_what_cannot_be_exact_is_refused(dense, tmp_path):
    folder = tiny_models.save("qwen3_moe", tmp_path / "tiny", num_layers=1, hidden=64)
    call(_odd, str(folder))
    bias, weight = dense[2]
    assert "no such name" in bias
    assert "(512, 64)" in weight
