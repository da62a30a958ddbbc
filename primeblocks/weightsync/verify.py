"""The proof of what is served: an engine's parameters against the trainer's, box by box."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import TransferError, UsageError
from ..layout import Shard
from .agree import Messenger
from .convert.conversion import Wiring
from .manifest import Manifest, NamedTensors, converts, describe, gather_manifests, named_tensors
from .marker import Digests
from .observed import (
    Form,
    Observed,
    are_digests,
    digest_as,
    digest_form,
    digest_tensors,
    observe,
    place_of,
    with_aliases,
)
from .parts import Encode, Parts
from .plan import Copy, Plan, owned_boxes
from .planner import plan_sync

__all__ = ["Verified", "verify_engine"]

_BUCKET_BYTES = 64 << 20
_KINDS = ("differing", "missing", "unexpected", "unobservable")
_Wrong = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Verified:
    """The answer to "does my engine run my weights?": names, each with where, or why.

    Attributes:
        tensors: the number of those compared.
        differing: the engine has other elements.
        missing: the engine has no such tensor.
        unexpected: the engine has it, and nothing that is sent leads to it.
        unobservable: the engine cannot show it.
    """

    tensors: int
    differing: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    unexpected: Mapping[str, str] = field(default_factory=dict)
    unobservable: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_proved(self) -> bool:
        """Whether every tensor was seen, and is the trainer's."""
        return not any(getattr(self, kind) for kind in _KINDS)

    @property
    def wrong(self) -> list[str]:
        """The names that differ, are missing or cannot be seen."""
        return [*self.differing, *self.missing, *self.unobservable]

    def table(self) -> str:
        """Tabulate what was found, a line a name."""
        rows = [(kind, *row) for kind in _KINDS for row in getattr(self, kind).items()]
        width = max((len(name) for _, name, _ in rows), default=0)
        lines = [f"{kind:12}  {name:{width}}  {where}" for kind, name, where in rows]
        return "\n".join([f"{self.tensors} tensors compared, {len(rows)} not proved", *lines])

    def raise_if_wrong(self) -> None:
        """Raise TransferError unless `is_proved`: what cannot be seen is not proved."""
        if not self.is_proved:
            found = {kind: names for kind in _KINDS if (names := getattr(self, kind))}
            firsts = {kind: next(iter(names.items())) for kind, names in found.items()}
            said = "; ".join(
                f"{len(found[kind])} {kind}, such as {name!r} ({where})"
                for kind, (name, where) in firsts.items()
            )
            raise TransferError(
                f"the engine is not shown to hold these weights: {said}; {self.tensors} compared. "
                "Publish again, or restart the engine."
            )


def verify_engine(
    parameters: NamedTensors | Digests,
    engine: object,
    *,
    into: Wiring | Sequence[Wiring] = (),
    plan: Plan | None = None,
    convert: Wiring | None = None,
    source: Manifest | None = None,
    encode: Encode | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 60.0,
) -> Verified:
    """Tell whether an engine runs these weights, and name the tensors that it does not.

    Nothing is pushed and nothing changes. Collective over the trainer's ranks. Cost: one pass over
    the weights on each side.

    Args:
        parameters: of this rank, as they were when the engine was updated last; or the `held` of a
            `Receipt`, to see whether the engine still has what it loaded.
        engine: on rank 0, what the engine holds: a module or tensors by name; where they are
            elsewhere, an `Observed` or `digest_tensors` of them; a list of those, one for each
            process; or a function that returns it. None on other ranks.
        into: for each reader, the wiring that leads to its parameters, where they are fused,
            stacked or sliced.
        plan, convert, source, encode, group: as the `Publisher` has them. Without a plan one is
            made, to `into` or to the names that both have.
        timeout_s: the time that ranks wait for each other.

    Raises:
        PlanError: the trainer has not what the plan says, or another trainer's plan was observed;
            or either side is something else than tensors by name.
        UsageError: no engine was given, or there are several and no plan, or no name is in common.
        TransferError: a rank failed, or did not come in time.
    """
    deadline = time.monotonic() + timeout_s
    if callable(engine) and not isinstance(engine, nn.Module):
        engine = engine()
    parameters = _once(parameters)
    given = engine if isinstance(engine, list) else [] if engine is None else [engine]
    held = [_once(one) for one in given]
    if are_digests(parameters) or (held and are_digests(held[0])):
        if len(held) != 1:
            raise UsageError(f"{len(held)} engines; digests are compared with one. Give one.")
        return _by_digests(parameters, held[0])
    mine = cast(NamedTensors, parameters)
    wirings = [into] if isinstance(into, Wiring) else list(into)
    wrong: _Wrong = {kind: {} for kind in _KINDS}
    is_complete = plan is None  # A plan of others may have readers elsewhere.
    if plan is None and wirings:
        sources = _sources(mine, group)
        plan = plan_sync(sources, wirings, bucket_bytes=_BUCKET_BYTES, convert=convert)
        every = sources if convert is None else [convert.targets]
        led = {name for wiring in wirings for name in wiring.sources}
        more = dict.fromkeys(name for names in every for name in names if name not in led)
        wrong["missing"] |= dict.fromkeys(more, "no wiring of into= leads from it")
    elif plan is None:
        mine, held, plan = _in_common(mine, held, wrong)
        if plan is None:
            return Verified(len(held[0]), **wrong)
    agreement = Messenger(world_size=plan.world_size, group=group)
    seen = _shared(agreement, plan, held, wirings, deadline)
    if is_complete:
        for reader in set(range(len(plan.wants))) - {one.reader for one in seen}:
            wrong["missing"] |= dict.fromkeys(plan.wants[reader], f"reader {reader}, not observed")
    parts = Parts(plan, agreement.rank, mine, source=source, convert=convert, encode=encode)
    parts.refresh()
    _compare(plan, agreement.rank, parts, seen, wrong)
    for row in agreement.exchange(wrong, deadline=deadline):
        for kind, names in row.items():
            wrong[kind] = {**names, **wrong[kind]}
    compared = {name for one in seen for name in plan.wants[one.reader]}
    return Verified(len(compared), **{kind: dict(sorted(wrong[kind].items())) for kind in _KINDS})


def _shared(
    agreement: Messenger, plan: Plan, held: Sequence[Any], into: Sequence[Wiring], deadline: float
) -> list[Observed]:
    """Observe what this rank can see, and return what all ranks saw."""
    wirings = dict(enumerate(into))
    seen = [
        one
        if isinstance(one, Observed)
        else observe(plan, one, reader=reader, convert=wirings.get(reader))
        for reader, one in enumerate(held)
    ]
    told = agreement.exchange({"seen": [one.to_json() for one in seen]}, deadline=deadline)
    seen = [Observed.from_json(raw) for row in told for raw in row["seen"]]
    if not seen:
        raise UsageError("no rank gave an engine. Pass what it holds on rank 0.")
    for one in seen:
        one.check(plan)
    return seen


def _once(source: Any) -> Any:
    """Return tensors by name that can be read again; what else a side may be as it is."""
    is_kept = isinstance(source, nn.Module | Observed) or are_digests(source)
    return source if is_kept else named_tensors(source)


def _by_digests(parameters: Any, engine: Any) -> Verified:
    theirs = engine if are_digests(engine) else digest_tensors(with_aliases(engine))
    mine = parameters if are_digests(parameters) else digest_as(parameters, theirs)
    both = [name for name in mine if name in theirs]
    return Verified(
        len(both),
        {name: theirs[name][0] for name in both if tuple(mine[name]) != tuple(theirs[name])},
        _only(parameters, theirs),
        _only(engine, mine),
    )


def _only(some: Any, other: Container[str]) -> dict[str, str]:
    """Return the tensors of which `other` has no name, nor that of one they are tied to."""
    if are_digests(some):
        return {name: row[0] for name, row in some.items() if name not in other}
    every = with_aliases(some)
    tied = {place_of(one) for name, one in every.items() if name in other} - {None}
    return {
        name: str(tuple(one.shape))
        for name, one in named_tensors(some).items()
        if name not in other and place_of(one) not in tied
    }


def _sources(parameters: NamedTensors, group: dist.ProcessGroup | None) -> list[Manifest]:
    mine = describe(parameters)
    joined = group is not None or dist.is_initialized()
    return gather_manifests(mine, group=group) if joined else [mine]


def _in_common(
    parameters: NamedTensors, held: Sequence[Any], wrong: _Wrong
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], Plan | None]:
    """Return the tensors that both have, under each of their names, and the plan between them.

    No plan where there are no elements to compare.
    """
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    if len(held) != 1 or isinstance(held[0], Observed) or not is_alone:
        raise UsageError(
            f"{len(held)} processes and no plan. Pass plan=, as the Publisher has it, or into=."
        )
    mine, theirs = with_aliases(parameters), with_aliases(held[0])
    both = [name for name in theirs if name in mine]
    wrong["missing"], wrong["unexpected"] = _only(parameters, theirs), _only(held[0], mine)
    for name in both:
        kinds = [_kind(one[name]) for one in (theirs, mine)]
        if kinds[0] != kinds[1]:
            wrong["differing"][name] = f"{kinds[0]}, not {kinds[1]}"
    if not both:
        raise UsageError(f"no name in common: {list(mine)[:2]} and {list(theirs)[:2]}. Pass into=.")
    held = [{name: theirs[name] for name in both if name not in wrong["differing"]}]
    plan = None
    if any(one.numel() for one in held[0].values()):
        plan = plan_sync([describe(mine)], describe(held[0]), bucket_bytes=_BUCKET_BYTES)
    return mine, held, plan


def _kind(tensor: Tensor) -> tuple[object, ...]:
    """Return what no cast changes."""
    is_cast = converts(tensor.dtype, torch.float32)
    return tuple(tensor.shape) if is_cast else (*tensor.shape, tensor.dtype)


def _compare(plan: Plan, rank: int, parts: Parts, seen: Sequence[Observed], wrong: _Wrong) -> None:
    """Compare what this rank would send with what each reader has."""
    wrong["unexpected"] |= {name: f"reader {one.reader}" for one in seen for name in one.unexpected}
    wrong["missing"] |= {name: f"reader {one.reader}" for one in seen for name in one.absent}
    found: dict[tuple[int, int, int], list[Form]] = defaultdict(list)  # By reader, bucket and copy.
    for one in seen:
        rows = iter(one.forms)
        for index in plan.of_reader(one.reader):
            for place in range(len(plan.buckets[index].copies)):
                found[one.reader, index, place] += next(rows)
    readers = {one.reader for one in seen}
    for index in plan.of_rank(rank):
        bucket = plan.buckets[index]
        views, dtypes = parts.views(index)
        rooms = [view.detach().to("cpu", dtype) for view, dtype in zip(views, dtypes, strict=True)]
        for reader in readers & set(bucket.readers):
            for place, (copy, room) in enumerate(zip(bucket.copies, rooms, strict=True)):
                _compare_copy(reader, copy, room, found[reader, index, place], wrong)


def _compare_copy(
    reader: int, copy: Copy, room: Tensor, forms: Sequence[Form], wrong: _Wrong
) -> None:
    for box, way, dtype, digest in forms:
        where = f"reader {reader}, {_text(box)}"
        if not dtype:
            wrong["unobservable"].setdefault(copy.name, f"{where}: {way}")
            continue
        mine = room[box.within(copy.box).slices]
        theirs = getattr(torch, dtype)
        if not converts(mine.dtype, theirs):
            wrong["differing"].setdefault(copy.name, f"{where}, {theirs}, not {mine.dtype}")
        elif digest_form(way, mine.to(theirs)) != digest:
            wrong["differing"].setdefault(copy.name, f"{where}, {way}")
    seen = dict.fromkeys(form.box.within(copy.box) for form in forms)
    if owned_boxes(enumerate(seen), copy.box.sizes)[1]:
        wrong["missing"].setdefault(copy.name, f"reader {reader}, of {_text(copy.box)}")


def _text(box: Shard) -> str:
    spans = (f"{at}:{at + size}" for at, size in zip(box.offsets, box.sizes, strict=True))
    return f"[{', '.join(spans)}]"
