"""A model in parts, saved and loaded: whole as by transformers, and in parts for other ranks."""

import resource
import warnings
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from primeblocks.errors import PlanError, RankError, UnsupportedError
from primeblocks.parallel.experts import add_expert_lora
from primeblocks.testing import ranks, tiny_models
from tests.deadlines import HANG_S
from tests.parallel.bodies import meshes_of
from tests.parallel.test_transformers_start import _model as sized_model

ROWS, SIZES = 12, {"num_experts": 12, "hidden": 64, "vocab": 32, "num_layers": 2}


def _model(family, *, tied=False, device="cpu"):
    """Parameters and what a checkpoint leaves out, made on `device`."""
    return sized_model(family, device=device, tied=tied, **SIZES)


def _step(model, optimizer):
    """One step on this rank's share of the same rows, however many ranks there are."""
    rows = torch.randint(32, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    ids = rows.tensor_split(dist.get_world_size())[dist.get_rank()]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    (-logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum() / (ROWS * 5)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _wholes(model):
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def _start(family, degrees, *, device="cpu", **more):
    from primeblocks.parallel.adapters.transformers import parallelize

    model = _model(family, device=device, **more)
    parallelize(model, meshes_of(**degrees))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _save_parts(family, degrees, path):
    """Weights when they were saved, and one step later."""
    model, optimizer = _start(family, degrees)
    _step(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)
    saved = _wholes(model)
    _step(model, optimizer)
    return saved, _wholes(model)


def _resume(family, degrees, path):
    model, optimizer = _start(family, degrees, device="meta")
    assert all(p.to_local().isnan().all() for p in model.parameters())  # Nothing to mistake.
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    loaded = _wholes(model)
    _step(model, optimizer)
    return loaded, _wholes(model)


def test_a_run_resumes_on_other_ranks(tmp_path, full):
    family = "gpt_oss"  # Its experts have biases too.
    saved, after = ranks.run(_save_parts, family, {"expert": 2}, tmp_path)[0]
    # One rank has no expert degree, three share twelve.
    for world_size, degrees in [
        (1, {}),
        (3, {"expert": 3}),
        *([(2, {"expert": 2}), (4, {"expert": 2})] if full else []),
    ]:
        loaded, stepped = ranks.run(_resume, family, degrees, tmp_path, world_size=world_size)[0]
        for name, weight in saved.items():
            assert torch.equal(loaded[name], weight), (world_size, name)
            # Moments came along: Adam divides by them, so that an error is a step of the rate.
            torch.testing.assert_close(stepped[name], after[name], rtol=0, atol=1e-2 * 1e-2)


def _save_whole(path):
    """Write the model before it is in parts and after; read it into one that held nothing."""
    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    warnings.simplefilter("error")
    if dist.get_rank() == 0:
        _model("qwen3_moe", tied=True).save_pretrained(path / "one")
    model, reference = _start("qwen3_moe", {"expert": 2}, tied=True)
    written, read = [], []
    save_pretrained(model, path / "parts", progress=lambda *at: written.append(at))
    dist.barrier()
    empty, optimizer = _start("qwen3_moe", {"expert": 2}, tied=True, device="meta")
    load_pretrained(empty, path / "parts", progress=lambda *at: read.append(at))
    for told in (written, read):  # On every rank.
        assert told == [(done, len(told)) for done in range(1, len(told) + 1)] != []
    ids = torch.arange(12).view(2, 6)
    got, want = (m(input_ids=ids, use_cache=False).logits for m in (empty, model))
    assert torch.equal(got, want)  # Frequencies, too, which no checkpoint holds.
    load_pretrained(empty, path / "one")  # After a forward, when parts of it are whole.
    for stepped in (False, True):
        assert all(torch.equal(a, b) for a, b in zip(*map(_local, (empty, model)), strict=True))
        if not stepped:
            _step(model, reference)
            _step(empty, optimizer)
    return type(model).__name__


def _local(model):
    return [x.to_local() if isinstance(x, DTensor) else x for x in model.state_dict().values()]


def test_the_whole_is_written_as_from_one_rank(tmp_path):
    names = ranks.run(_save_whole, tmp_path)
    assert all(name.startswith("FSDP") for name in names)  # As it was before.
    one, parts = (load_file(tmp_path / kind / "model.safetensors") for kind in ("one", "parts"))
    assert one.keys() == parts.keys()
    assert all(torch.equal(one[name], parts[name]) for name in one)
    one, parts = ((tmp_path / kind / "config.json").read_text() for kind in ("one", "parts"))
    assert one == parts


def _refusals():
    from primeblocks.parallel.adapters.transformers import (
        load_pretrained,
        parallelize,
        save_pretrained,
    )

    adapted, meshes = _model("qwen3_moe"), meshes_of()
    add_expert_lora(adapted, rank=2, alpha=4)
    parallelize(adapted, meshes)
    for use in (save_pretrained, load_pretrained):
        with pytest.raises(UnsupportedError, match="has adapters .*lora_A.*merged_expert_weights"):
            use(adapted, "adapted")
    half = _model("qwen3_moe", device="meta")
    half.lm_head.to_empty(device="cpu")
    with pytest.raises(PlanError, match="24 of 25 parameters are on the meta device"):
        parallelize(half, meshes)


def test_adapters_and_models_that_are_half_on_the_meta_device_are_refused():
    ranks.run(_refusals)


@pytest.mark.parametrize("family", sorted((*tiny_models.FAMILIES, *tiny_models.OTHER_FAMILIES)))
def test_the_meta_device_loses_no_buffer(family):
    from primeblocks.parallel.adapters.transformers.checkpoint import materialize

    config = tiny_models.config(family, **SIZES | {"num_layers": 4})
    one = tiny_models._model_class(family).from_config(config)
    with torch.device("meta"):
        bare = tiny_models._model_class(family).from_config(config)
    materialize(bare, torch.device("cpu"))
    assert all(parameter.isnan().all() for parameter in bare.parameters())
    kept = one.state_dict().keys()
    for (name, got), (same, want) in zip(bare.named_buffers(), one.named_buffers(), strict=True):
        assert name == same
        assert name in kept or torch.equal(got, want), name


def _fill(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(value)


def _older(path):
    """One file where several were, and several where one was."""
    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    model, _ = _start("qwen3_moe", {"expert": 2})
    read, _ = _start("qwen3_moe", {"expert": 2}, device="meta")
    for value, size in enumerate(("50GB", "100KB", "50GB")):
        _fill(model, value)
        save_pretrained(model, path, max_shard_size=size)
        several = size == "100KB"
        assert (path / "model.safetensors").exists() != several
        assert (path / "model.safetensors.index.json").exists() == several
        assert (len([*path.glob("model-*")]) > 1) == several
        load_pretrained(read, path)
        assert all((p.to_local() == value).all() for p in read.parameters())
        dist.barrier()


def test_an_older_checkpoint_is_not_taken_for_the_new_one(tmp_path):
    ranks.run(_older, tmp_path)


@contextmanager
def full_disk(num_bytes):
    """No file may grow beyond `num_bytes`."""
    own = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, own[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, own)


def _full(path):
    """A disk that takes nothing, and other troubles of rank 0 alone."""
    from primeblocks.parallel.adapters.transformers import save_pretrained as save

    model, _ = _start("qwen3_moe", {"expert": 2})
    error = RankError if dist.get_rank() else PlanError
    with full_disk(20_000), pytest.raises(error, match="File too large"):
        save(model, path / "full", max_shard_size="100KB")
    assert len([*(path / "full").glob("*.safetensors")]) == 1  # Nothing more, in no file.
    if dist.get_rank() == 0:
        (path / "taken" / "model.safetensors.index.json").mkdir(parents=True)
        (path / "a file").write_text("")
    dist.barrier()
    for size in ("100KB", "50GB"):
        with pytest.raises(error, match=r"index.json"):
            save(model, path / "taken", max_shard_size=size)
    with pytest.raises(error, match=r"a file.* cannot be written"):
        save(model, path / "a file")
    model.generation_config.temperature = 0.6
    with warnings.catch_warnings(record=True), pytest.raises(error, match="temperature"):
        save(model, path / "odd")
    model.generation_config.temperature = None
    save(model, path / "well")  # And all is well again.


def test_what_rank_0_cannot_write_is_an_error_on_all_ranks(tmp_path):
    ranks.run(_full, tmp_path)


def _sizes(path):
    """Sizes of files that differ between ranks, or are none."""
    from primeblocks.parallel.adapters.transformers import save_pretrained

    rank = dist.get_rank()
    model, _ = _start("qwen3_moe", {"expert": 2})
    for sizes in (("100KB", "50GB"), (1 << 20, (1 << 20) + 1), ("1MB", 10**6)):
        with pytest.raises(PlanError, match="max_shard_size must be equal on all ranks"):
            save_pretrained(model, path / "none", max_shard_size=sizes[rank])
    for wrong in (None, True, 0, -5, 10**5000, 1.5, "", "5", "-5GB", "infGB", "9" * 5000):
        for who in (0, 1):
            error, size = (PlanError, wrong) if rank == who else (RankError, "50GB")
            with pytest.raises(error, match='must be a number of bytes, or text like "5GB"; '):
                save_pretrained(model, path / "none", max_shard_size=size)
    assert not (path / "none").exists()
    save_pretrained(model, path / "well", max_shard_size="0.1 mb")


def test_sizes_of_files_are_one_on_all_ranks(tmp_path):
    ranks.run(_sizes, tmp_path)
    assert len([*(tmp_path / "well").glob("*.safetensors")]) > 1


def _unheard(path):
    """Rank 0 alone cannot tell of a tensor."""
    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    model, _ = _start("qwen3_moe", {"expert": 2})
    for value, error in enumerate((BrokenPipeError("closed"), ValueError("of 3"))):
        for use in (save_pretrained, load_pretrained):
            told = []

            def progress(*at, told=told, error=error):
                told.append(at)
                if dist.get_rank() == 0 and len(told) == 3:
                    raise error

            _fill(model, value if use is save_pretrained else torch.nan)
            with pytest.raises(type(error)) if dist.get_rank() == 0 else nullcontext() as caught:
                use(model, path, progress=progress)
            assert caught is None or caught.value is error
            assert (len(told) == 3) == (dist.get_rank() == 0)
            dist.barrier()
        assert all((p.to_local() == value).all() for p in model.parameters())


def test_an_error_of_progress_is_raised_after_the_last_tensor(tmp_path):
    ranks.run(_unheard, tmp_path)


def _traffic(path):
    """Groups, devices and timeouts of what goes between ranks."""
    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    model, _ = _start("qwen3_moe", {"expert": 2})
    groups, parts, waits, world = [], [], [], dist.group.WORLD
    new_group, send, recv = dist.new_group, dist.isend, dist.irecv
    dist.new_group = lambda **named: groups.append(new_group(**named)) or groups[-1]

    def recorded(way):
        def go(x, *at, group):
            parts.append((group, x.device.type))
            work = way(x, *at, group)
            return SimpleNamespace(wait=lambda most: waits.append(most) or work.wait(most))

        return go

    dist.isend, dist.irecv = recorded(send), recorded(recv)
    for use in (save_pretrained, load_pretrained):
        before = world._get_sequence_number_for_group()
        use(model, path)
        assert world._get_sequence_number_for_group() == before + 1  # That all make the call.
    assert len(groups) == 2
    assert {*parts} == {(groups[0], "cpu")}
    assert waits == [timedelta(days=1)] * len(parts)  # The group's timeout is not theirs in gloo.
    return [each._get_backend(torch.device("cpu")).options._timeout for each in groups]


def test_ranks_wait_for_a_checkpoint_longer_than_for_each_other(tmp_path):
    assert ranks.run(_traffic, tmp_path) == [[timedelta(days=1)] * 2] * 2


def _killed(path):
    """Rank 2 dies after its third tensor, while rank 1 waits for rank 0."""
    from primeblocks.parallel.adapters.transformers import save_pretrained

    model, _ = _start("qwen3_moe", {"expert": 3})
    told = []

    def progress(*at):
        told.append(at)
        if len(told) == 3:
            ranks.kill(2)

    with pytest.raises(RuntimeError):  # RankError, or gloo's own.
        save_pretrained(model, path, progress=progress)
    return "saw it"


def test_a_rank_that_dies_ends_the_wait(tmp_path):
    found = ranks.run(_killed, tmp_path, world_size=3, timeout_s=HANG_S)
    assert found == ["saw it", "saw it", None]


def _cast(path):
    """A conversion of transformers that casts, as it may."""
    from primeblocks.parallel.adapters.transformers import checkpoint_save

    own, model = checkpoint_save.revert_weight_conversion, _start("qwen3_moe", {"expert": 2})[0]

    def casting(*given):
        return {name: x.to(torch.bfloat16) for name, x in own(*given).items()}

    checkpoint_save.save_pretrained(model, path / "wide")
    checkpoint_save.revert_weight_conversion = casting
    checkpoint_save.save_pretrained(model, path / "narrow")


def test_what_a_conversion_casts_is_cast_when_it_is_received(tmp_path):
    ranks.run(_cast, tmp_path)
    wide, narrow = (load_file(tmp_path / x / "model.safetensors") for x in ("wide", "narrow"))
    assert wide.keys() == narrow.keys()
    assert all(torch.equal(wide[name].bfloat16(), narrow[name]) for name in wide)


def test_a_deferred_tensor_splits_as_torch_splits():
    from primeblocks.parallel.adapters.transformers.deferred import Deferred

    for tokens, size in ((5, 2), (4, 2), (5, [0, 3, 0, 2]), (0, 2), (0, [0, 0])):
        x = torch.empty(3, tokens)
        found = [part.shape for part in torch.split(Deferred.of(x), size, dim=1)]
        assert found == [part.shape for part in torch.split(x, size, dim=1)]
