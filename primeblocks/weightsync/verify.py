"""Compare an engine's parameters with the trainer's, box by box.

`verify_engine` makes one comparison. `prove_round_trip` makes a comparison after each of three
pushes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from ..errors import TransferError, UsageError
from ..layout import Shard, layout_of, local_part
from .agree import Messenger
from .convert.conversion import Wiring
from .manifest import Manifest, NamedTensors, converts, describe, gather_manifests, named_tensors
from .marker import Digests
from .observed import (
    UNSEEN,
    Form,
    Observed,
    are_digests,
    digest_form,
    digest_tensors,
    observe,
    only_in,
    with_aliases,
)
from .parts import Encode, Parts
from .plan import Copy, Plan, owned_boxes
from .planner import plan_sync
from .progress import Counted, Progress

__all__ = ["Verified", "prove_round_trip", "verify_engine"]

_BUCKET_BYTES = 64 << 20
_KINDS = ("differing", "missing", "unexpected", "unobservable")
_Wrong = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Verified:
    """The result of `verify_engine`.

    The mappings list tensors that are not proved. A key is a tensor's name, and a value says where
    the tensor differs or why it is not proved.

    Attributes:
        tensors: the number of tensors compared.
        differing: tensors whose elements in the engine differ from the trainer's elements.
        missing: tensors that the engine does not have.
        unexpected: tensors of the engine that the trainer does not send.
        unobservable: tensors whose elements cannot be observed in the engine.
    """

    tensors: int
    differing: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    unexpected: Mapping[str, str] = field(default_factory=dict)
    unobservable: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_proved(self) -> bool:
        """Whether `differing`, `missing`, `unexpected` and `unobservable` are empty."""
        return not any(getattr(self, kind) for kind in _KINDS)

    @property
    def wrong(self) -> list[str]:
        """The names of tensors that differ, are missing or cannot be observed."""
        return [*self.differing, *self.missing, *self.unobservable]

    def table(self) -> str:
        """Tabulate the tensors that are not proved, with one line per name."""
        rows = [(kind, *row) for kind in _KINDS for row in getattr(self, kind).items()]
        width = max((len(name) for _, name, _ in rows), default=0)
        lines = [f"{kind:12}  {name:{width}}  {where}" for kind, name, where in rows]
        return "\n".join([f"{self.tensors} tensors compared, {len(rows)} not proved", *lines])

    def raise_if_wrong(self) -> None:
        """Raise TransferError if a tensor is not proved, for example if it cannot be observed."""
        if not self.is_proved:
            found = {kind: names for kind in _KINDS if (names := getattr(self, kind))}
            firsts = {kind: next(iter(names.items())) for kind, names in found.items()}
            said = "; ".join(
                f"{len(found[kind])} {kind}, such as {name!r} ({where})"
                for kind, (name, where) in firsts.items()
            )
            raise TransferError(
                f"the engine may not have these weights: {said}. {self.tensors} tensors were "
                "compared. Publish again, or restart the engine."
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
    progress: Progress | None = None,
) -> Verified:
    """Compare an engine's weights with the trainer's, and name the tensors that differ.

    Does not send or change weights. Collective over the trainer ranks. Cost: one pass over the
    weights in the trainer, and one in the engine.

    Args:
        parameters: this rank's parameters, unchanged since the last update of the engine. If you
            pass the `held` of a `Receipt` instead, the call checks whether the engine still has the
            loaded tensors. The call is then local, so make it only where the engine is. It ignores
            all other arguments except `engine` and `progress`.
        engine: on rank 0, a module, tensors by name, or an `Observed`. For several engine
            processes, a list with one entry for each process. `engine` may also be a function that
            returns one of these values. On ranks other than 0, pass None.
        into: for each engine process, the wiring to its parameters. Needed if these parameters
            are fused, stacked or sliced.
        plan, convert, source, encode, group: the arguments of the `Publisher`. Without `plan`, a
            plan is made for `into`. Without `plan` and `into`, tensors that have the same name
            in trainer and engine are compared.
        timeout_s: how long ranks wait for each other.
        progress: called after each bucket, or after each tensor if tensors are compared by name.
            The arguments are the number of bytes that this rank has compared, and the total number.

    Raises:
        PlanError: the trainer's tensors do not fit the plan, or the engine was observed with
            another plan. Also raised if `parameters` or `engine` has an unsupported type.
        UsageError: `engine` is missing, or trainer and engine do not have a tensor name in common.
            Also raised if `plan` and `into` are missing, and there are several ranks, several
            engine processes or an `Observed`.
        TransferError: a rank failed or was late.
    """
    if callable(engine) and not isinstance(engine, nn.Module):
        engine = engine()
    counted = Counted(progress)
    is_digested, mine = are_digests(parameters), cast(Any, parameters)
    if not is_digested and not isinstance(parameters, nn.Module):
        mine = named_tensors(mine)  # An iterator can be read only once.
    given: list[Any] = engine if isinstance(engine, list) else [] if engine is None else [engine]
    held = [e if isinstance(e, nn.Module | Observed) else named_tensors(e) for e in given]
    wirings = [into] if isinstance(into, Wiring) else list(into)
    if is_digested or (plan is None and not wirings):
        is_alone = not dist.is_initialized() or dist.get_world_size(group) == 1
        if len(held) != 1 or isinstance(held[0], Observed) or not (is_digested or is_alone):
            kinds = ", ".join(type(one).__name__ for one in held) or "no engine"
            raise UsageError(
                f"verify_engine() got {kinds} and no plan. Pass the Publisher's plan=, with which "
                "an Observed was made. For modules and tensors by name, you may pass into= "
                "instead. Digests of a Receipt need one module, or the tensors of one process."
            )
        if not is_digested and not (convert is source is encode is None):
            raise UsageError("convert=, source= and encode= need the Publisher's plan=, or into=.")
        return _by_name(mine, held[0], counted)
    wrong: _Wrong = {kind: {} for kind in _KINDS}
    is_complete = plan is None  # A plan that was passed may have other readers.
    if plan is None:
        sources, is_joined = [describe(mine)], group is not None or dist.is_initialized()
        if is_joined:
            sources = gather_manifests(sources[0], group=group)
        plan = plan_sync(sources, wirings, bucket_bytes=_BUCKET_BYTES, convert=convert)
        every = sources if convert is None else [convert.targets]
        led = {name for wiring in wirings for name in wiring.sources}
        more = dict.fromkeys(name for names in every for name in names if name not in led)
        wrong["missing"] |= dict.fromkeys(more, "no wiring of into= leads from it")
    agreement = Messenger(world_size=plan.world_size, group=group)
    seen = _shared(agreement, plan, held, wirings, timeout_s)
    if is_complete:
        for reader in set(range(len(plan.wants))) - {one.reader for one in seen}:
            wrong["missing"] |= dict.fromkeys(plan.wants[reader], f"reader {reader}, not observed")
    parts = Parts(plan, agreement.rank, mine, source=source, convert=convert, encode=encode)
    parts.refresh()
    _compare(parts, seen, wrong, counted)
    for row in agreement.exchange(wrong, deadline=time.monotonic() + timeout_s):
        for kind, names in row.items():
            wrong[kind] = {**names, **wrong[kind]}
    compared = {name for one in seen for name in plan.wants[one.reader]}
    return Verified(len(compared), **{kind: dict(sorted(wrong[kind].items())) for kind in _KINDS})


def prove_round_trip(
    parameters: NamedTensors,
    push: Callable[[int], object],
    verify: Callable[[], Verified],
    *,
    version: int,
) -> Verified:
    """Prove that an engine gets the trainer's weights, before training relies on this.

    Pushes the parameters, then changed parameters, then the original parameters again. After each
    push, `verify` must find the pushed values. The change gives every floating-point element the
    other sign and a random magnitude, seeded by the tensor's name and shard. So equal tensors
    become different. Tied tensors change once. In dtypes of one byte, the change only flips a bit
    of each element. The parameters are always restored. If the call returns, the engine holds the
    original parameters.

    Collective if `push` or `verify` is. Cost: three calls of `push` and of `verify`, and memory for
    a copy of the parameters.

    Args:
        parameters: this rank's parameters. They are changed in place and restored.
        push: makes the engine load the parameters as the given version, for example by a publish
            and an update.
        verify: calls `verify_engine` on the engine, and returns the result.
        version: the version of the first push. The next two versions are used too.

    Raises:
        TransferError: the engine does not hold what was pushed. All ranks raise this error.
        UsageError: no parameter is floating-point, and there is only one rank.

    Source: tokenspeed issue 1373, an update that reports success and loads unwritten memory.
    """
    if not isinstance(parameters, nn.Module):
        parameters = named_tensors(parameters)  # An iterator can be read only once.
    floating = any(map(_is_floating, named_tensors(parameters).values()))
    if not floating and (not dist.is_initialized() or dist.get_world_size() == 1):
        raise UsageError(
            "there is nothing to prove, because no parameter is floating-point. Pass "
            "floating-point weights."
        )

    def look(version: int) -> Verified:
        push(version)
        found = verify()
        if found.wrong:
            raise TransferError(
                f"{len(found.wrong)} tensors, such as {found.wrong[0]!r}, differ in the engine "
                f"after the push of version {version}:\n{found.table()}"
            )
        return found

    look(version)
    with _perturbed(parameters):
        look(version + 1)
    return look(version + 2)


def _shared(
    agreement: Messenger, plan: Plan, held: Sequence[Any], into: Sequence[Wiring], timeout_s: float
) -> list[Observed]:
    """Observe the engine processes of this rank, and return the observations of all ranks."""
    wirings = dict(enumerate(into))
    seen = [
        one
        if isinstance(one, Observed)
        else observe(plan, one, reader=reader, convert=wirings.get(reader))
        for reader, one in enumerate(held)
    ]
    message = {"seen": [one.to_json() for one in seen]}
    told = agreement.exchange(message, deadline=time.monotonic() + timeout_s)
    seen = [Observed.from_json(raw) for row in told for raw in row["seen"]]
    if not seen:
        raise UsageError("verify_engine() got no engine. Pass engine= on rank 0.")
    for one in seen:
        one.check(plan)
    return seen


def _by_name(parameters: Any, engine: NamedTensors, counted: Counted) -> Verified:
    """Compare digests of the tensors that both sides have, under each of their names."""
    names = parameters if are_digests(parameters) else with_aliases(parameters)
    every = {name: local_part(one.detach()) for name, one in with_aliases(engine).items()}
    differing: dict[str, str] = {}
    both = [name for name in every if name in names]
    hidden = {name: UNSEEN for name in both if every[name].is_meta}
    shown = [name for name in both if name not in hidden]
    counted.begin(sum(every[name].nbytes for name in shown))
    for name in shown:
        theirs, mine = every[name], names[name]
        if isinstance(mine, Tensor):
            mine = local_part(mine.detach())
            mine = mine.to(theirs.dtype) if converts(mine.dtype, theirs.dtype) else mine
            mine = digest_tensors({name: mine})[name]
        have, want = digest_tensors({name: theirs})[name], tuple(mine)
        if have != want:
            differing[name] = have[0] if have[0] == want[0] else f"{have[0]}, not {want[0]}"
        counted.add(theirs.nbytes)
    if not both and not are_digests(parameters):
        first = f"{list(names)[:2]} and {list(every)[:2]}"
        raise UsageError(f"trainer and engine do not have a name in common: {first}. Pass into=.")
    missing, unexpected = only_in(parameters, every), only_in(engine, names)
    return Verified(len(both) - len(hidden), differing, missing, unexpected, hidden)


def _compare(parts: Parts, seen: Sequence[Observed], wrong: _Wrong, counted: Counted) -> None:
    """Compare what this rank would send with what each reader has."""
    plan, rank = parts.plan, parts.rank
    wrong["unexpected"] |= {name: f"reader {one.reader}" for one in seen for name in one.unexpected}
    wrong["missing"] |= {name: f"reader {one.reader}" for one in seen for name in one.absent}
    found: dict[tuple[int, int, int], list[Form]] = defaultdict(list)  # By reader, bucket, `Copy`.
    for one in seen:
        rows = iter(one.forms)
        for index in plan.of_reader(one.reader):
            for place in range(len(plan.buckets[index].copies)):
                found[one.reader, index, place] += next(rows)
    readers = {one.reader for one in seen}
    counted.begin(plan.written_bytes(rank))
    for index in plan.of_rank(rank):
        bucket = plan.buckets[index]
        views, dtypes = parts.views(index)
        rooms = [view.detach().to("cpu", dtype) for view, dtype in zip(views, dtypes, strict=True)]
        for reader in readers & set(bucket.readers):
            for place, (copy, room) in enumerate(zip(bucket.copies, rooms, strict=True)):
                _compare_copy(reader, copy, room, found[reader, index, place], wrong)
        counted.add(bucket.bytes)


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


def _is_floating(tensor: Tensor) -> bool:
    return (tensor.dtype.is_floating_point or tensor.dtype.is_complex) and tensor.numel() > 0


@contextmanager
def _perturbed(parameters: NamedTensors) -> Iterator[None]:
    # Tied tensors change once. They have two names, or are views of the same elements.
    places: dict[object, tuple[str, Tensor]] = {}
    for name, parameter in named_tensors(parameters).items():
        tensor = local_part(parameter.detach())
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        where = f"{name} {layout_of(parameter).shard.offsets}"  # Replicas change alike.
        places.setdefault((*place, tensor.shape, tensor.stride()), (where, tensor))
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for where, tensor in places.values():
            if _is_floating(tensor):
                kept.append((tensor, tensor.clone()))
                _perturb(tensor, where)
        yield
    finally:
        for tensor, before in reversed(kept):
            tensor.copy_(before)


def _perturb(tensor: Tensor, where: str) -> None:
    """Give each element the other sign and 1/4 to 3/4 of its magnitude, seeded by `where`."""
    if tensor.dtype.itemsize == 1:  # The first bit is the sign if the dtype has one.
        has_sign = tensor.dtype != torch.float8_e8m0fnu
        tensor.view(torch.uint8).bitwise_xor_(0x80 if has_sign else 1)
        return
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    seeded = torch.Generator(plain.device).manual_seed(xxhash.xxh3_64_intdigest(where.encode()))
    with torch.inference_mode(tensor.is_inference()):
        for part in plain.view(-1).split(1 << 20) if plain.is_contiguous() else [plain]:
            by = torch.rand(part.shape, generator=seeded, device=part.device).add_(0.5).mul_(0.5)
            sizes = part.abs().masked_fill_(~part.isfinite() | (part == 0), 1.0).mul_(by)
            part.copy_(torch.where(part.signbit(), sizes, -sizes))
