"""What a model of transformers may be called with once it is parallel: plans, masks, labels."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import PlanError, UnsupportedError
from primeblocks.parallel import global_token_count, plan_sequence
from primeblocks.parallel.experts import AllToAllDispatcher
from primeblocks.testing import ranks, tiny_models
from tests.parallel.bodies import each, meshes_of
from tests.parallel.test_transformers_families import (
    ATTENTIONS,
    DOCUMENTS,
    INDEXED,
    Float64,
    StableTopK,
    _errors,
    _loss,
    _model,
    _one_by_one,
    _tokens,
)


def _with_and_without_plan(family, attention, checkpointing):
    """At context 1 either call is right, whatever the model was called with before."""
    from primeblocks.parallel.adapters.transformers import local_inputs, parallelize

    meshes = meshes_of()
    plan, tokens = plan_sequence(DOCUMENTS, ranks=1), _tokens(0)
    packed = local_inputs(tokens, sequence=plan, group=meshes.context.get_group())
    padded = {"input_ids": tokens[:24].view(2, 12), "attention_mask": torch.ones(2, 12).long()}
    padded["attention_mask"][1, :5] = 0
    model, whole = _model(family), _model(family)
    if checkpointing:
        contexts = {"context_fn": lambda: (nullcontext(), Float64())}
        model.gradient_checkpointing_enable({"use_reentrant": False} | contexts)
    parallelize(model, meshes, attention=ATTENTIONS.get(attention))
    with Float64(), StableTopK():
        # The later call changes nothing for the backward of the earlier one.
        logits = model(**packed).logits[0]
        got = model(**padded, use_cache=False).logits
        loss = _loss(logits, plan.labels(tokens))
        loss.backward()
        want = whole(**padded, use_cache=False).logits
        expected = _one_by_one(whole, [0], 1)
    kept = padded["attention_mask"].bool()
    torch.testing.assert_close(got[kept], want[kept], rtol=0, atol=1e-12)
    return _errors(loss.detach(), model, expected, whole)


def test_whole_sequences_may_have_a_plan():
    families = ["afmoe", "glm_moe_dsa", "gpt_oss", "nemotron_h", "qwen3_5_moe", "qwen3_vl_moe"]
    cases = []
    for at, family in enumerate(families):  # They take turns.
        attention = "ring" if at % 2 and family not in INDEXED else None
        cases.append((family, attention, at % 2 == 0))
    (found,) = ranks.run(each, _with_and_without_plan, cases, world_size=1)
    for case, errors in zip(cases, found, strict=True):
        assert max(errors.values()) < 1e-12, (case, errors)


def _plans_that_no_model_follows():
    from primeblocks.parallel.adapters.transformers import local_inputs, parallelize

    meshes = meshes_of()
    group = meshes.context.get_group()
    inputs = local_inputs(_tokens(0), sequence=plan_sequence(DOCUMENTS, ranks=1), group=group)
    model = _model("gpt_oss")
    parallelize(model, meshes)
    positions = inputs.pop("position_ids")
    for part in (model, model.get_decoder()):
        with pytest.raises(PlanError, match="came without position_ids"):
            part(**inputs)
    inputs |= {"position_ids": positions, "labels": inputs["input_ids"]}
    with pytest.raises(PlanError, match="inside this rank.s part. Shift labels before the split"):
        model(**inputs)


def test_a_plan_is_honoured_or_refused():
    ranks.run(_plans_that_no_model_follows, world_size=1)


def _own_loss(family, degrees):
    """The model's own loss and its gradients, given labels that were shifted before the split."""
    from primeblocks.parallel.adapters.transformers import local_inputs, parallelize

    meshes = meshes_of(**degrees)
    group, batch = meshes.context.get_group(), meshes.batch.get_local_rank()
    model, whole = _model(family), _model(family)
    parallelize(model, meshes)
    plan, tokens = plan_sequence(DOCUMENTS, ranks=group.size(), order="zigzag"), _tokens(batch)
    labels = plan.split(plan.labels(tokens), group=group)[None]
    count = global_token_count((labels != -100).sum(), meshes)
    inputs = local_inputs(tokens, sequence=plan, group=group)
    asked = {"labels": labels, "shift_labels": labels, "num_items_in_batch": count}
    with Float64(), StableTopK():
        loss = model(**inputs, **asked).loss
        loss.backward()
        want = _one_by_one(whole, range(meshes.plan.batch), count)
    loss = loss.detach()
    dist.all_reduce(loss)
    return _errors(loss, model, want, whole)


def test_the_loss_of_the_model_itself():
    degrees = {"qwen3_vl_moe": {"context": 2}, "hy_v4": {"context": 2}, "gpt_oss": {"expert": 2}}
    for found in ranks.run(each, _own_loss, [*degrees.items()]):
        for family, errors in zip(degrees, found, strict=True):
            assert max(errors.values()) < 1e-12, (family, errors)


def _losses_of_one_rank():
    """Losses that would be those of the tokens at hand; on one rank these are all."""
    from primeblocks.parallel.adapters.transformers import local_inputs, parallelize

    ids = torch.arange(12).view(1, 12)
    wrong = [
        (PlanError, "Pass num_items_in_batch=global_token_count", {"labels": ids}),
        (UnsupportedError, "auxiliary loss from this rank", {"output_router_logits": True}),
    ]
    split = meshes_of(context=2)
    group = split.context.get_group()
    packed = local_inputs(
        torch.arange(24), sequence=plan_sequence([9, 15], ranks=2, order="zigzag"), group=group
    )
    unshifted = (
        PlanError,
        "Shift labels before the split",
        {"labels": ids, "num_items_in_batch": 22},
    )
    uncounted = (*wrong[0][:2], {"labels": ids, "shift_labels": ids})
    for meshes, inputs, refused in [
        (meshes_of(), {"input_ids": ids}, wrong),
        (split, packed, [unshifted, uncounted, wrong[1]]),
    ]:
        model = _model("qwen3_moe")
        parallelize(model, meshes)
        for error, said, arguments in refused:
            with pytest.raises(error, match=said):
                model(**inputs, **arguments)
        in_order = inputs["input_ids"], None, inputs.get("position_ids"), None, None, ids
        rest = {name: inputs[name] for name in inputs.keys() - {"input_ids", "position_ids"}}
        with pytest.raises(PlanError, match="num_items_in_batch|Shift labels before"):
            model(*in_order, **rest)
        model(**inputs)
        model.config.output_router_logits = True
        with pytest.raises(UnsupportedError, match="also in the configuration"):
            model(**inputs)
        model(**inputs, output_router_logits=False)
    images = _model("qwen3_vl_moe")
    parallelize(images, meshes_of())
    images.config.text_config.output_router_logits = True  # Its own configuration has none.
    with pytest.raises(UnsupportedError, match="also in the configuration"):
        images(input_ids=ids)


def test_losses_of_one_rank_are_refused():
    ranks.run(_losses_of_one_rank)


def _other_ranks():
    from primeblocks.parallel.adapters.transformers import parallelize

    meshes = meshes_of(expert=2)
    groups = [dist.new_group(pair) for pair in ([0, 2], [1, 3])]
    across = AllToAllDispatcher(groups[dist.get_rank() % 2])
    with pytest.raises(PlanError, match="uses ranks .* group meshes.expert.get_group"):
        parallelize(_model("qwen3_moe"), meshes, dispatcher=across)


def test_a_dispatcher_over_as_many_other_ranks_is_refused():
    ranks.run(_other_ranks, world_size=4)


def _alone():
    from primeblocks.parallel.adapters.transformers import parallelize

    ids = torch.arange(12).view(2, 6)
    model, whole = _model("qwen3_moe"), _model("qwen3_moe")
    parallelize(model, meshes_of())
    arguments = {"labels": ids, "output_router_logits": True, "use_cache": False}
    got, want = (m(input_ids=ids, **arguments) for m in (model, whole))
    torch.testing.assert_close(got.loss, want.loss)
    torch.testing.assert_close(got.aux_loss, want.aux_loss)


def test_one_rank_alone_has_every_loss():
    ranks.run(_alone, world_size=1)


def _scores_that_live():
    from primeblocks.parallel.adapters.transformers import indexed, local_inputs, parallelize

    model, meshes, made = _model("glm_moe_dsa"), meshes_of(), weakref.WeakSet()
    parallelize(model, meshes)
    sequence = plan_sequence([12], ranks=1)
    inputs = local_inputs(
        torch.arange(12) % 30, sequence=sequence, group=meshes.context.get_group()
    )
    start = indexed._Scores.__init__

    def noted(self, *arguments):
        start(self, *arguments)
        made.add(self)

    with mock.patch.object(indexed._Scores, "__init__", noted):
        gc.disable()
        try:
            model(**inputs).logits.sum().backward()
            return len(made)
        finally:
            gc.enable()


def test_an_indexer_leaves_no_latents_to_the_garbage_collector():
    assert ranks.run(_scores_that_live, world_size=1) == [0]


def _wide_buffers():
    from primeblocks.parallel.adapters.transformers import parallelize

    for family in ("deepseek_v3", "nemotron_h"):
        config = tiny_models.build(family).config
        with torch.device("meta"):
            model = tiny_models._model_class(family).from_config(config, dtype=torch.bfloat16)
        parallelize(model, meshes_of())
        assert next(model.parameters()).dtype == torch.bfloat16
        biases = [x for name, x in model.named_buffers() if "e_score_correction_bias" in name]
        assert {bias.dtype for bias in biases} == {torch.float32}


def test_biases_that_choose_experts_stay_in_float32():
    ranks.run(_wide_buffers, world_size=1)


def _recurrence_kernels():
    from primeblocks.parallel.adapters.transformers import local_inputs, parallelize
    from primeblocks.parallel.linear.kernels import chunk_gated_delta_rule, chunk_state_space

    meshes, calls = meshes_of(), []
    for family in ("llama", "glm_moe_dsa"):
        model = _model(family)
        with pytest.raises(UnsupportedError, match="no recurrent layers that could use"):
            parallelize(model, meshes, recurrence_kernel=chunk_state_space)
        assert type(model).__name__[:4] != "FSDP"
    for kind in ("dynamic", "longrope"):
        model = _model("llama")
        model.config.rope_parameters = {"rope_type": kind}
        with pytest.raises(UnsupportedError, match=f"rope_type '{kind}' takes its frequencies"):
            parallelize(model, SimpleNamespace(plan=SimpleNamespace(context=2)))
    for family, kernel in [
        ("nemotron_h", chunk_state_space),
        ("qwen3_next", chunk_gated_delta_rule),
        ("qwen3_5_moe", chunk_gated_delta_rule),
    ]:

        def counted(*args, family=family, kernel=kernel, **more):
            calls.append(family)
            return kernel(*args, **more)

        model = _model(family)
        parallelize(model, meshes, recurrence_kernel=counted)
        plan = plan_sequence(DOCUMENTS, ranks=1)
        model(**local_inputs(_tokens(0), sequence=plan, group=meshes.context.get_group()))
    return {family: calls.count(family) for family in calls}


def test_recurrent_layers_take_a_kernel():
    lengths = len(set(DOCUMENTS))  # Runs of equal length share a call.
    (calls,) = ranks.run(_recurrence_kernels, world_size=1)
    assert calls == dict.fromkeys(["nemotron_h", "qwen3_next", "qwen3_5_moe"], lengths)


def _wrong_calls(tmp_path):
    from primeblocks.parallel.adapters.transformers import load_pretrained, parallelize
    from primeblocks.parallel.adapters.transformers import save_pretrained as save

    model, meshes = _model("mixtral"), meshes_of()
    with pytest.raises(PlanError, match=r"such as .*ring_attention; got 'ring'"):
        parallelize(model, meshes, attention="ring")
    parallelize(model, meshes)
    with pytest.raises(PlanError, match="sharded already"):
        parallelize(model, meshes)
    with pytest.raises(PlanError, match="adapters.transformers.save_pretrained"):
        model.save_pretrained(tmp_path / "own")
    save(model, tmp_path / "ours")
    load_pretrained(model, tmp_path / "ours")


def test_calls_that_a_sharded_model_cannot_answer_name_the_right_one(tmp_path):
    ranks.run(_wrong_calls, tmp_path, world_size=1)
