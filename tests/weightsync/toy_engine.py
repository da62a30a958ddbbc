"""A toy engine of tensor-parallel ranks, whose loader fuses, stacks, slices, turns and pads."""

import re
from itertools import accumulate

import torch

from primeblocks.weightsync.convert import record_reads

ONE = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
ALL = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_bias)?")
FUSED = dict.fromkeys("qkv", "qkv_proj") | dict.fromkeys(("gate", "up"), "gate_up_proj")


class ToyRank:
    """One rank. `load` takes a checkpoint's names, like that of a real engine."""

    def __init__(self, checkpoint, rank, ranks):
        self.rank, self.ranks = rank, ranks
        self.parameters, self.starts = {}, {}
        shapes, experts = {}, 0
        for name, spec in checkpoint.items():
            target, expert, section, part = self.part(name, torch.empty(spec.shape, device="meta"))
            rows = part.shape[0] + (-part.shape[0] % 64 if target.startswith("vocab") else 0)
            shapes.setdefault(target, (expert is None, part.shape[1:], {}))[2][section] = rows
            experts = max(experts, 0 if expert is None else expert + 1)
        for target, (is_one, rest, rows) in shapes.items():
            starts = accumulate(rows.values(), initial=0)
            self.starts[target] = dict(zip([*rows, "end"], starts, strict=True))
            stack = () if is_one else (experts,)
            self.parameters[target] = torch.zeros(*stack, self.starts[target]["end"], *rest)

    def mine(self, tensor, dim):
        return tensor.chunk(self.ranks, dim)[self.rank]

    def part(self, name, tensor):
        """A parameter, the expert and the section in it, and the part of a tensor for there."""
        head, _, kind = name.rpartition(".")
        layer, _, last = head.rpartition(".")
        part = last.removesuffix("_proj")
        if one := ONE.fullmatch(name):
            head, expert, kind = one.groups()
            target, dim = ("w2", 1) if kind == "down" else ("w13", 0)
            return f"{head}.{target}", int(expert), kind, self.mine(tensor, dim)
        if every := ALL.fullmatch(name):  # As GPT-OSS has them: turned.
            turned = tensor if every[3] else tensor.mT.contiguous()
            dim = 1 if every[2] == "gate_up" else 2
            return f"{name}.turned", None, "", turned if every[3] else self.mine(turned, dim)
        if "embed_tokens" in name or "lm_head" in name:
            return f"vocab.{name}", None, "", self.mine(tensor, 0)
        if part != last and part in FUSED:
            return f"{layer}.{FUSED[part]}.{kind}", None, part, self.mine(tensor, 0)
        is_row = part in ("o", "down") and part != last and kind == "weight"
        return name, None, "", self.mine(tensor, 1) if is_row else tensor

    @torch.no_grad()
    def load(self, tensors):
        for name, tensor in tensors:
            target, expert, section, part = self.part(name, tensor)
            whole = self.parameters[target]
            place = whole if expert is None else whole[expert]
            place.narrow(0, self.starts[target][section], part.shape[0]).copy_(part)


def wirings(checkpoint, ranks):
    """The recorded way from a checkpoint to the parameters of each rank."""
    return [
        record_reads(engine.load, checkpoint, into=engine.parameters).into
        for engine in (ToyRank(checkpoint, rank, ranks) for rank in range(ranks))
    ]


def moved(wiring, tensors):
    """Whole targets of whole sources, in new memory."""
    made = {}
    for name, spec in wiring.targets.items():
        made[name] = torch.zeros(spec.shape, dtype=spec.dtype)
        for piece in wiring.by_target[name]:
            whole = wiring.sources[piece.source].layout.shard
            made[name][piece.target_box.slices].copy_(piece.view(tensors[piece.source], whole))
    return made
