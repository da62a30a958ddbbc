"""Conversions and FP8 on the way: from a trainer's shards to an engine's own parameters."""

import pytest
import torch
import torch.distributed as dist

from primeblocks import fp8
from primeblocks.errors import PlanError
from primeblocks.layout import Layout, Shard
from primeblocks.testing import ranks, tiny_models
from primeblocks.weightsync import Publisher, Subscriber, describe, plan_sync
from primeblocks.weightsync.adapters.transformers import to_checkpoint as checkpoint_of
from primeblocks.weightsync.manifest import Manifest, TensorSpec, named_tensors
from tests.deadlines import HANG_S
from tests.weightsync.contents import Engine, same_bytes, transport_of
from tests.weightsync.reference import slice_again
from tests.weightsync.toy_engine import ToyRank, moved, wirings

pytest.importorskip("transformers")
ranks.preload(__name__)  # With all that it imports.

SIZES = {"num_layers": 2, "hidden": 128, "num_experts": 4, "top_k": 1, "vocab": 72}
TRAINERS, ENGINES = 2, 2


def rows_of(manifest, rank):
    """What a rank holds: uneven parts of dim 0, and the last tensor in full on both."""
    parts = []
    for name, spec in manifest.items():
        shape = spec.shape
        if len(shape) < 2:
            parts.append((name, TensorSpec(spec.dtype, Layout.whole(shape))))
            continue
        first = (shape[0] + 2) // 3
        start, size = (0, first) if rank == 0 else (first, shape[0] - first)
        box = Shard((start, *(0,) * (len(shape) - 1)), (size, *shape[1:]))
        parts.append((name, TensorSpec(spec.dtype, Layout(shape, box))))
    return Manifest(tuple(parts))


def sync_family(kind, where, family):
    """Bytes that the plan writes, and its lower bound; asserts what each engine gets."""
    model = tiny_models.build(family, dtype="float32", **SIZES)
    module = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
    whole, rank = describe(module), dist.get_rank()
    to_checkpoint = checkpoint_of(model, whole)
    checkpoint = to_checkpoint.targets.whole(dtype=torch.bfloat16)
    engines = wirings(checkpoint, ENGINES)
    sources = [rows_of(whole, trainer) for trainer in range(TRAINERS)]
    plan = plan_sync(sources, engines, bucket_bytes=1 << 14, convert=to_checkpoint)
    transport = transport_of(kind, where, plan)
    group = dist.new_group(list(range(TRAINERS)), backend="gloo")
    if rank < TRAINERS:
        parts = slice_again(module, sources[rank])
        publisher = Publisher(
            plan, parts, transport, group=group, source=sources[rank], convert=to_checkpoint
        )
        publisher.publish(1, timeout_s=HANG_S)
    else:
        reader, engine = rank - TRAINERS, Engine()
        wiring = engines[reader]
        Subscriber(plan, engine, transport, reader=reader, convert=wiring).receive(timeout_s=HANG_S)
        made = moved(to_checkpoint, module)
        cast = {name: tensor.to(checkpoint[name].dtype) for name, tensor in made.items()}
        assert same_bytes(engine.tensors, moved(wiring, cast))
        toy = ToyRank(checkpoint, reader, ENGINES)
        toy.load(cast.items())
        assert all(toy.parameters[name].equal(one.float()) for name, one in engine.tensors.items())
    dist.barrier()
    transport.close()
    return plan.bytes_total, plan.lower_bound_bytes


FAMILIES = {"qwen3_moe": 1, "gpt_oss": 2, "deepseek_v3": 1, "glm4_moe": 1}  # and kinds of each


def sync_families(where):
    kinds = ("group", "shared_memory")
    return [sync_family(k, where, family) for family, n in FAMILIES.items() for k in kinds[:n]]


def test_shards_of_a_trainer_fill_the_parameters_of_tensor_parallel_engines(tmp_path):
    for sizes in ranks.run(sync_families, str(tmp_path), world_size=TRAINERS + ENGINES):
        for written, bound in sizes:
            assert written == bound > 0


# --- FP8 -----------------------------------------------------------------------------------------

TILE = fp8.Tile(128, 128)
RECIPE = fp8.Recipe(weights=TILE, source="float32")


def encoder_of(recipe):
    return fp8.encode_weights(recipe, only="[ab]", layouts=None)


def fp8_body(where):
    generator = torch.Generator().manual_seed(0)
    whole = {
        "a.weight": torch.randn(300, 200, generator=generator),
        "b.weight": torch.randn(128, 130, generator=generator),
        "norm": torch.randn(7, generator=generator),
    }
    encoder, rank = encoder_of(RECIPE), dist.get_rank()
    cuts = {"a.weight": [(0, 256), (256, 44)], "b.weight": [(0, 128), (128, 0)]}
    sources = [
        Manifest(
            tuple(
                (name, TensorSpec(t.dtype, Layout(tuple(t.shape), box)))
                for name, t in whole.items()
                for box in [
                    Shard((cuts[name][r][0], 0), (cuts[name][r][1], t.shape[1]))
                    if name in cuts
                    else Shard((0,), (7,))
                ]
            )
        )
        for r in range(TRAINERS)
    ]
    encoded = [encoder.describe(source) for source in sources]
    plan = plan_sync(encoded, encoded[0].whole(), bucket_bytes=1 << 14)
    transport = transport_of("shared_memory", where, plan)
    publisher = Publisher(
        plan,
        slice_again(whole, sources[rank]),
        transport,
        source=encoded[rank],
        encode=encoder,
        full_every=3,
    )
    engine = Engine()
    with Subscriber(plan, engine, transport) as subscriber:
        publisher.publish(1, timeout_s=HANG_S)
        subscriber.receive(timeout_s=HANG_S)
        for name in cuts:
            made = fp8.quantize(whole[name], TILE)
            assert engine.tensors[name].view(torch.uint8).equal(made.codes.view(torch.uint8))
            assert engine.tensors[f"{name}_scale_inv"].equal(made.scales)
        assert engine.tensors["norm"].equal(whole["norm"])
        publisher.publish(2, timeout_s=HANG_S)
        again = subscriber.receive(timeout_s=HANG_S)
    dist.barrier()
    transport.close()
    return plan.bytes_total, again.bytes


def test_fp8_travels_as_codes_and_scales_bit_for_bit(tmp_path):
    for size, delta in ranks.run(fp8_body, str(tmp_path), world_size=TRAINERS):
        codes, scales = 300 * 200 + 128 * 130, 4 * (3 * 2 + 1 * 2)
        assert size == codes + scales + 7 * 4
        assert delta < 0.02 * size  # Nothing changed.


def test_another_recipe_is_refused_before_a_byte_is_sent():
    held = describe({"a.weight": torch.zeros(128, 128)})
    other = fp8.Recipe(activations=fp8.Tile(1, 128), weights=fp8.Tile(64, 128))
    trainer, engine = encoder_of(RECIPE).describe(held), encoder_of(other).describe(held)
    with pytest.raises(PlanError, match="recipe .* readers expect .* Give both the same recipe"):
        plan_sync([trainer], engine.whole(), bucket_bytes=1 << 14)
    with pytest.raises(PlanError, match="encodes with recipe '', but readers expect"):
        plan_sync([held], trainer.whole(), bucket_bytes=1 << 14)
