"""Weights read straight into parts, and written one at a time: bytes, memory, refusals."""

import json
import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from primeblocks.errors import PlanError, RankError, UnsupportedError
from primeblocks.layout import layout_of, local_part
from primeblocks.parallel import plan_mesh
from primeblocks.testing import ranks, tiny_models
from primeblocks.testing.oracles import StepCounter

FAMILIES = sorted({*tiny_models.FAMILIES, *tiny_models.OTHER_FAMILIES} - {"minimax"})
NO_EXPERTS = ("llama", "qwen3")
SIZES = {"num_experts": 6, "hidden": 64, "vocab": 30, "num_layers": 2}


def _model(family, *, device="cpu", dtype=torch.float32, tied=None, **sizes):
    layers = {"num_layers": 4} if family == "nemotron_h" else {}
    torch.manual_seed(0)
    config = tiny_models.config(family, **SIZES | layers | sizes)
    if tied is not None:
        config.tie_word_embeddings = tied
    with torch.device(device):
        return tiny_models._model_class(family).from_config(config, dtype=dtype).train()


def _start(family, *, expert=None, degrees=None, **more):
    from primeblocks.parallel.adapters.transformers import parallelize

    world_size = dist.get_world_size()
    expert = (1 if family in NO_EXPERTS else world_size) if expert is None else expert
    model = _model(family, device="meta", **more)
    degrees = {"expert": expert} if degrees is None else degrees
    parallelize(model, plan_mesh(world_size=world_size, **degrees).build("cpu"))
    return model


class Reads:
    """Bytes of each read of a file, while it is entered."""

    def __enter__(self):
        from primeblocks.parallel.adapters.transformers.checkpoint_files import Stored

        self.sizes, self._own = [], Stored.read

        def read(stored, box):
            found = self._own(stored, box)
            self.sizes.append(found.nbytes)
            return found

        Stored.read = read
        return self

    def __exit__(self, *problem):
        from primeblocks.parallel.adapters.transformers.checkpoint_files import Stored

        Stored.read = self._own


def _held_bytes(model):
    return sum(local_part(x).nbytes for x in model.state_dict().values())


def _round(families, path):
    """Read what one rank wrote, and write it again."""
    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    warnings.simplefilter("error")
    for family in families:
        one, again = path / family / "one", path / family / "again"
        if dist.get_rank() == 0:
            _model(family).save_pretrained(one)
        dist.barrier()
        model, whole = _start(family), _model(family).state_dict()
        with Reads() as reads:
            load_pretrained(model, one)
        for name, part in model.state_dict().items():
            box = layout_of(part).shard.slices
            assert torch.equal(local_part(part), whole[name][box]), (family, name)
        assert sum(reads.sizes) == _held_bytes(model), family  # Nothing twice, nothing for others.
        save_pretrained(model, again)
        if dist.get_rank() == 0:
            files = sorted(p.name for p in one.iterdir())
            assert files == sorted(p.name for p in again.iterdir()), family
            for name in files:
                assert (one / name).read_bytes() == (again / name).read_bytes(), (family, name)
            shutil.rmtree(path / family)
        dist.barrier()


def test_every_family_is_read_by_the_box_and_written_byte_for_byte(tmp_path, full):
    several = ["gpt_oss", "hy_v4", "llama", "mixtral", "nemotron_h", "qwen3_5_moe", "qwen3_vl_moe"]
    ranks.run(_round, FAMILIES if full else several, tmp_path, world_size=3)


def _several_files(path):
    """What this library wrote in several files, read by both."""
    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    model, whole = _start("qwen3_moe"), _model("qwen3_moe")
    for x, y in zip(model.state_dict().values(), whole.state_dict().values(), strict=True):
        local_part(x).copy_(y[layout_of(x).shard.slices])
    save_pretrained(model, path, max_shard_size="100KB")
    again = _start("qwen3_moe")
    load_pretrained(again, path)
    theirs = type(whole).from_pretrained(path).state_dict()
    for name, x in again.state_dict().items():
        assert torch.equal(theirs[name], whole.state_dict()[name]), name
        assert torch.equal(local_part(x), theirs[name][layout_of(x).shard.slices]), name


def test_several_files_have_an_index(tmp_path):
    ranks.run(_several_files, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    assert len(files) > 3
    found = {name: file for file, tensors in files.items() for name in tensors}
    assert index["weight_map"] == found
    sizes = [sum(x.nbytes for x in tensors.values()) for tensors in files.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert max(sizes) <= 100_000


def _peaks(path):
    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    sizes = {"hidden": 128, "vocab": 256, "num_experts": 16}
    if dist.get_rank() == 0:
        _model("qwen3_moe", **sizes).save_pretrained(path / "one")
    dist.barrier()
    largest = max(x.nbytes for x in load_file(path / "one" / "model.safetensors").values())
    with StepCounter() as start, Reads() as reads:
        model = _start("qwen3_moe", **sizes)
        load_pretrained(model, path / "one")
    with StepCounter() as end:
        save_pretrained(model, path / "again")
    whole = sum(x.nbytes for x in load_file(path / "again" / "model.safetensors").values())
    return start.peak_bytes, max(reads.sizes), end.peak_bytes, _held_bytes(model), largest, whole


def test_memory_holds_the_shard_and_one_tensor(tmp_path):
    for rank, found in enumerate(ranks.run(_peaks, tmp_path, world_size=4)):
        start, read, end, shard, largest, whole = found
        assert whole > 3 * (shard + largest)  # Else it shows nothing.
        # Agreements take some bytes, and so do frequencies, which no checkpoint holds.
        assert start <= 1.01 * shard
        assert read <= largest
        assert end <= 1.01 * (largest if rank == 0 else shard)


def _odd(path):
    """Of each case: what rank 0 received to write, and what it lacked."""
    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    found = {}
    for case, (degrees, sizes, dtype) in ODD.items():
        one, again = path / case / "one", path / case / "again"
        if dist.get_rank() == 0:
            _model("qwen3_moe", **sizes).save_pretrained(one)
        dist.barrier()
        model = _start("qwen3_moe", degrees=degrees, dtype=dtype, **sizes)
        whole = _model("qwen3_moe", **sizes).to(dtype).state_dict()
        load_pretrained(model, one)
        for name, part in model.state_dict().items():
            box = layout_of(part).shard.slices
            assert torch.equal(local_part(part), whole[name][box]), (case, name)
        with StepCounter() as step:
            save_pretrained(model, again)
        if dist.get_rank() == 0:
            written = load_file(again / "model.safetensors")
            theirs = load_file(one / "model.safetensors")
            assert written.keys() == theirs.keys()
            assert all(torch.equal(x, theirs[name].to(dtype)) for name, x in written.items())
            lacked = sum(x.nbytes for x in whole.values()) - _held_bytes(model)
            found[case] = step.received_bytes["recv_"], lacked
    return found


ODD = {
    "copies": ({"expert": 2, "replicate": 2}, {}, torch.float32),
    "fewer experts than ranks": ({}, {"num_experts": 2}, torch.float32),
    "cast": ({"expert": 2}, {}, torch.bfloat16),
}


def test_copies_uneven_experts_and_another_dtype(tmp_path):
    by_case = ranks.run(_odd, tmp_path, world_size=4)[0]
    assert by_case.keys() == ODD.keys()
    for case, (received, lacked) in by_case.items():
        assert received == lacked, case  # Nothing twice.


def _computed(path):
    """Conversions that compute with weights, which would need the whole of them."""
    from transformers.core_model_loading import MergeModulelist, SplitModulelist

    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    first = dist.get_rank() == 0
    if first:
        _model("qwen3_moe").save_pretrained(path / "one")
    dist.barrier()
    model = _start("qwen3_moe")
    for kind, error, use, said in [
        (MergeModulelist, PlanError if first else RankError, load_pretrained, "box by box"),
        (SplitModulelist, UnsupportedError, save_pretrained, "cannot be deferred"),
    ]:
        own = kind.convert

        def computed(op, tensors, *args, own=own, **kwargs):
            return own(op, {k: _half_twice(v) for k, v in tensors.items()}, *args, **kwargs)

        kind.convert = computed
        with pytest.raises(error, match=said):
            use(model, path / "one")
        kind.convert = own
    load_pretrained(model, path / "one")  # And all is well again.


def _half_twice(x):
    return [one / 2 * 2 for one in x] if isinstance(x, list) else x / 2 * 2


def test_what_must_be_computed_with_is_refused(tmp_path):
    ranks.run(_computed, tmp_path)


def _copied(folder, name, tensors=None):
    """A folder like another, with other tensors if any are given."""
    copy = folder.parent / name
    shutil.copytree(folder, copy)
    if tensors is not None:
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


EXPERT, INDEX = "model.layers.1.mlp.experts.5.down_proj.weight", "model.safetensors.index.json"
# By folder: what rank 0 is told. transformers raises all kinds of errors for them.
WRONG = {
    "fewer": r"experts.down_proj is \(5, 64, 64\) in the checkpoint and \(6, 64, 64\) in the model",
    "wider": r"lm_head.weight is \(31, 64\) in the checkpoint and \(30, 64\) in the model",
    "llama": "is missing",
    "cut": "cannot be read as a Qwen3MoeForCausalLM",
    "bin": "cannot be read as a Qwen3MoeForCausalLM",
    "an empty expert": "cannot be read as a Qwen3MoeForCausalLM",
    "a deep expert": "cannot be read as a Qwen3MoeForCausalLM",
    "gptq": "quantized by 'gptq'.* Save them dequantized first",
    "a list": "AttributeError",
    "no words": "AttributeError",
    "index": "cannot be read as a Qwen3MoeForCausalLM: KeyError: 'weight_map'",
    "names": "AttributeError",
    "above": "outside of the folder: '../one",
    "absolute": "outside of the folder: '/",
}


def _write_wrong(path):
    """Each is the model of seed 0 with one oddity."""
    one, several = path / "one", path / "several"
    _model("qwen3_moe").save_pretrained(one)
    _model("qwen3_moe").save_pretrained(several, max_shard_size="100KB")
    _model("llama").save_pretrained(path / "llama")
    tensors, changes = load_file(one / "model.safetensors"), {}
    changes["fewer"] = {k: v for k, v in tensors.items() if k != EXPERT}
    changes["wider"] = tensors | {"lm_head.weight": torch.zeros(31, 64)}
    changes["more"] = tensors | {"model.extra": torch.zeros(3)}
    changes["an empty expert"] = tensors | {EXPERT: tensors[EXPERT][:0].clone()}
    changes["a deep expert"] = tensors | {EXPERT: tensors[EXPERT][None].clone()}
    changes["other"] = {k: v.bfloat16() for k, v in tensors.items()}
    for name, changed in changes.items():
        _copied(one, name, changed)
    file = _copied(one, "cut") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    file = _copied(one, "bin") / "model.safetensors"
    file.unlink()
    torch.save(tensors, file.with_name("pytorch_model.bin"))
    config = json.loads((one / "config.json").read_text())
    gptq = {"quant_method": "gptq", "bits": 4}
    for name, changed in {
        "gptq": config | {"quantization_config": gptq},
        "no words": config | {"quantization_config": "fp8"},
        "a list": [],
    }.items():
        (_copied(one, name) / "config.json").write_text(json.dumps(changed))
    index = json.loads((several / INDEX).read_text())
    places = index["weight_map"]
    for name, changed in {
        "index": {},
        "names": index | {"weight_map": ["a.safetensors"]},
        "above": index | {"weight_map": places | {EXPERT: "../one/model.safetensors"}},
        "absolute": index | {"weight_map": places | {EXPERT: str(one / "model.safetensors")}},
    }.items():
        (_copied(several, name) / INDEX).write_text(json.dumps(changed))
    last = _copied(several, "twice") / max(places.values())  # Where the index does not say.
    again = min(places, key=places.get)
    save_file(load_file(last) | {again: torch.ones_like(tensors[again])}, last, {"format": "pt"})


def _refusals(path):
    from primeblocks.parallel.adapters.transformers import load_pretrained

    warnings.simplefilter("error")
    rank = dist.get_rank()
    if rank == 0:
        _write_wrong(path)
    dist.barrier()
    model, whole = _start("qwen3_moe"), _model("qwen3_moe").state_dict()
    for name, said in WRONG.items():
        with pytest.raises(RankError if rank else PlanError, match=said):
            load_pretrained(model, path / name)
    with pytest.raises(RankError if rank == 0 else PlanError, match="it is not a folder on this"):
        load_pretrained(model, path / ("nowhere" if rank else "one"))
    with pytest.raises(PlanError, match="the checkpoint must be equal on all ranks"):
        load_pretrained(model, path / ("other" if rank else "one"))  # One rank alone sees it.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        load_pretrained(model, path / "more")
    said = ["1 weights of the checkpoint match no parameter: model.extra ..."]
    assert [str(w.message) for w in warned] == ([] if rank else said)
    for name in ("twice", "one"):  # And all is well again.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_(torch.nan)
        load_pretrained(model, path / name)
        for key, part in model.state_dict().items():
            assert torch.equal(local_part(part), whole[key][layout_of(part).shard.slices]), key


def test_what_cannot_be_read_is_an_error_on_all_ranks_and_oddities_are_read(tmp_path):
    ranks.run(_refusals, tmp_path)


def _tied(path):
    """Tied weights under one name, under both, and under both with other rows on the last rank."""
    from primeblocks.parallel.adapters.transformers import load_pretrained

    first, name, one = dist.get_rank() == 0, "lm_head.weight", path / "one"
    model = _start("qwen3_moe", tied=True)
    if first:
        _model("qwen3_moe", tied=True).save_pretrained(one)
        tensors = load_file(one / "model.safetensors")
        for folder, more in (("both", 0), ("apart", 1)):
            again = tensors["model.embed_tokens.weight"].clone()
            again[-1, -1] += more
            _copied(one, folder, tensors | {name: again})
    dist.barrier()
    held = sum(local_part(p).nbytes for p in model.parameters())  # Tied weights once.
    second = local_part(model.lm_head.weight).nbytes
    for folder, size in (("one", held), ("both", held + second)):
        with Reads() as reads:
            load_pretrained(model, path / folder)
        assert sum(reads.sizes) == size
    with pytest.raises(RankError if first else PlanError, match=f"different tensors for {name}"):
        load_pretrained(model, path / "apart")


def test_tied_weights_that_differ_are_refused(tmp_path):
    ranks.run(_tied, tmp_path)
