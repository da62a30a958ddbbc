"""The round-trip proof: push, perturb, restore, and each time observe what the engine holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ..errors import TransferError, UsageError
from ..layout import layout_of, local_part
from .agree import Messenger
from .convert.conversion import Wiring
from .manifest import Manifest, NamedTensors, named_tensors
from .marker import Digests
from .observed import are_digests, differing, digest_tensors
from .parts import Encode
from .plan import Plan
from .verify import verify_engine

__all__ = ["RoundTrip", "prove_round_trip"]

_MESSAGE_CHARS = 600
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20
_ODD = 0x5851F42D4C957F2D


@dataclass(frozen=True)
class RoundTrip:
    """A proof that succeeded: the versions pushed, its duration and its number of tensors."""

    versions: tuple[int, int, int]
    seconds: float
    tensors: int


def prove_round_trip(
    parameters: NamedTensors,
    push: Callable[[int], object],
    observe: Callable[[], object] | None,
    *,
    version: int,
    timeout_s: float,
    names: Iterable[str] | None = None,
    into: Wiring | Sequence[Wiring] = (),
    plan: Plan | None = None,
    convert: Wiring | None = None,
    source: Manifest | None = None,
    encode: Encode | None = None,
    group: dist.ProcessGroup | None = None,
) -> RoundTrip:
    """Show that what the trainer has is what the engine holds, before a run relies on it.

    Pushes the parameters, then perturbed ones, then the first again. Each time the engine is
    verified, as `verify_engine` does it. Where that takes a plan that is not given, because names
    are others or ranks have parts, every piece of every tensor that the engine holds has to change
    with the second push, and to be exactly as at first after the third.

    Every floating element is negated and divided by 2 to 16, by its name and place, so that equal
    tensors become different ones. It shows in whatever dtype it travels; tied ones change once.
    Whatever happens, the parameters end as they were; the engine holds them if this returns.

    Collective. Cost: three pushes, three observations, and memory for a copy of the parameters.

    Args:
        parameters: of this rank; changed in place and back.
        push: makes the engine load a version of them; for example a publish, then an update.
        observe: returns what the engine holds: a module, its tensors by name, or `digest_tensors`
            of them where they are elsewhere; with a plan, all that `verify_engine` takes. None on
            ranks that cannot see the engine.
        version: that of the first push; the next two are used too.
        timeout_s: for everything; `push` and `observe` have deadlines of their own.
        names: the tensors that have to be there and change, where the engine has names of its own
            and there is no plan. None takes the names of the floating `parameters`. Whatever else
            is observed, integers and tables for example, only has to come back.
        into, plan, convert, source, encode: as in `verify_engine`.
        group: a gloo group of the trainer's ranks; None is the default group, or no group.

    Raises:
        TransferError: the engine does not hold what was pushed, on all ranks; or time is up.
        UsageError: `observe` gives no tensors by name, or `names` is empty.

    Source: tokenspeed issue 1373, where an update reports success and loads memory that nobody
    wrote, which a check that only perturbs does not notice.
    """
    start = time.monotonic()
    deadline = start + timeout_s
    size = dist.get_world_size(group) if group is not None or dist.is_initialized() else 1
    agreement = Messenger(world_size=size, group=group)
    planned = plan is not None or bool(into)
    wanted = list(_floating(parameters) if names is None else names)
    if observe is not None and not wanted:
        raise UsageError("there is nothing to prove: no name of a floating parameter is given.")

    def look(version: int) -> tuple[Digests, list[str]]:
        push(version)
        held = None if observe is None else observe()
        left_s = max(0.0, deadline - time.monotonic())
        if planned:
            found = verify_engine(
                parameters, held, into=into, plan=plan, convert=convert, source=source,
                encode=encode, group=group, timeout_s=left_s,
            )  # fmt: skip
            return {}, found.wrong
        seen = {} if held is None else _digests(held)
        if not seen or size > 1 or names is not None:
            return seen, []
        wrong = verify_engine(parameters, seen).differing
        return seen, [name for name in wanted if name in wrong]

    def agree(problem: str) -> None:
        told = agreement.exchange({"problem": problem}, deadline=deadline)
        for rank, reply in enumerate(told):
            if reply["problem"]:
                raise TransferError(f"rank {rank}: {reply['problem']}")

    sees = observe is not None and not planned
    before, wrong = look(version)
    lacks = [name for name in wanted if sees and name not in before]
    with _perturbed(parameters):
        changed, also_wrong = look(version + 1)
    deaf = [name for name in wanted if sees and _is_deaf(before, changed, name)]
    agree(
        _told(lacks, wanted, "are not among what the engine holds. Give names=, if it has others")
        or _told(deaf, wanted, "are as before after other weights: they do not arrive")
        or _told(wrong or also_wrong, wanted, "are others in the engine than in the trainer")
    )
    after, wrong = look(version + 2)
    agree(
        _told(
            differing(before, after), before, "are others after the same weights: it serves others"
        )
        or _told(wrong, wanted, "are others in the engine than in the trainer")
    )
    versions = version, version + 1, version + 2
    return RoundTrip(versions, time.monotonic() - start, len(wanted))


def _digests(held: object) -> Digests:
    """Return the digests of what `observe` gave."""
    if isinstance(held, torch.nn.Module):
        return digest_tensors(held)
    if isinstance(held, Mapping):
        if held and all(isinstance(one, Tensor) for one in held.values()):
            return digest_tensors(held)
        rows = {name: (one,) if isinstance(one, str) else one for name, one in held.items()}
        if are_digests(rows):
            return {name: tuple(row) for name, row in rows.items()}
    raise UsageError(
        f"observe gave {type(held).__name__}; the proof is by tensor. Give the engine's tensors by "
        "name, or digest_tensors of them."
    )


def _is_deaf(before: Digests, changed: Digests, name: str) -> bool:
    """Tell whether some piece is as it was."""
    pairs = zip(before.get(name, ()), changed.get(name, ()), strict=False)
    return any(a == b and " " not in a for a, b in pairs)  # Beside its dtype and shape.


def _told(found: list[str], of: Iterable[str], text: str) -> str:
    if not found:
        return ""
    return f"{len(found)} of {len(list(of))} tensors, such as {found[0]!r}, {text}"[:_MESSAGE_CHARS]


def _floating(parameters: NamedTensors) -> list[str]:
    tensors = named_tensors(parameters).items()
    return [
        name
        for name, one in tensors
        if (one.dtype.is_floating_point or one.is_complex()) and one.numel()
    ]


@contextmanager
def _perturbed(parameters: NamedTensors) -> Iterator[None]:
    # Tied tensors are one: two names, or views of the same elements.
    places: dict[object, tuple[str, Tensor]] = {}
    for name, parameter in named_tensors(parameters).items():
        tensor = local_part(parameter.detach())
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        where = f"{name} {layout_of(parameter).shard.offsets}"  # Replicas change alike.
        places.setdefault((*place, tensor.shape, tensor.stride()), (where, tensor))
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for where, tensor in places.values():
            kept.append((tensor, tensor.clone()))
            _perturb(tensor, where)
        yield
    finally:
        for tensor, before in reversed(kept):
            tensor.copy_(before)


def _perturb(tensor: Tensor, where: str) -> None:
    """Negate each element and divide it by 2 to 16; integers stay.

    Name and offsets, `where`, and the place of an element say by what. A zero becomes a fraction:
    dividing alone would leave zeros as they are, negating alone the scales of quantized tensors.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.dtype.is_floating_point:
        return
    if tensor.dtype.itemsize == 1:  # The first bit is the sign where there is one.
        has_sign = tensor.dtype != torch.float8_e8m0fnu
        tensor.view(torch.uint8).bitwise_xor_(0x80 if has_sign else 1)
        return
    bits = _BITS[tensor.dtype.itemsize]
    factors = tensor.new_tensor([1 / 2, 1 / 4, 1 / 8, 1 / 16])
    seed, start = xxhash.xxh3_64_intdigest(where.encode()) >> 2, 0
    for part in tensor.view(-1).split(_CHUNK) if tensor.is_contiguous() else [tensor]:
        # A hash of the place: no slice of a tensor changes as another does.
        by = torch.arange(start, start + part.numel(), device=part.device).add_(seed)
        for _ in range(2):
            by = by.mul_(_ODD).bitwise_xor_(by >> 32)
        divided = part.masked_fill(part == 0, 15 / 8) * factors[by & 3].view(part.shape)
        part.copy_(torch.where(part.isfinite(), divided, part))
        part.view(bits).bitwise_xor_(torch.iinfo(bits).min)  # The sign, of what is no number too.
        start += part.numel()
