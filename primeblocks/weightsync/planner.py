"""`plan_sync`: choose one rank to send each element that a reader wants. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..errors import PlanError
from ..layout import Shard
from .convert.conversion import Reads, Wiring, union
from .manifest import FLOATS, Manifest, TensorSpec, converts
from .plan import Boxes, Bucket, Plan, cut, owned_boxes, packed

__all__ = ["BUCKET_BYTES", "plan_sync"]

BUCKET_BYTES = 64 << 20
_SMALLEST_BUCKET_BYTES = 64

_Target = Manifest | Wiring | Reads
# A box that is sent, the ranks that hold the box, and the readers that want the box.
_Cell = tuple[Shard, tuple[int, ...], tuple[int, ...]]


def plan_sync(
    sources: Sequence[Manifest],
    targets: _Target | Sequence[_Target],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    convert: Wiring | None = None,
) -> Plan:
    """Plan which rank sends each element that a reader wants. Pure.

    No rank gathers a tensor. If several ranks hold the same box, the rank with the fewest bytes to
    write sends it. The sender converts floats to the target's dtype.

    Args:
        sources: the manifests of the trainer ranks, in the order of the ranks.
        targets: one target for each reader, or a single target for a single reader. A target is
            a manifest of the boxes that the reader wants, the `Reads` of its loader, or the
            `Wiring` to its parameters.
        bucket_bytes: the most bytes that a bucket may have. Each bucket has one digest.
        convert: the wiring from the trainer's names and shapes to the names and shapes of
            `targets`.

    Raises:
        PlanError: a name is missing, or a shape, a dtype or a recipe does not fit. Also raised if
            no rank holds a wanted box.
    """
    if bucket_bytes < _SMALLEST_BUCKET_BYTES:
        raise PlanError(
            f"bucket_bytes is {bucket_bytes}, but must be at least {_SMALLEST_BUCKET_BYTES}. The "
            f"default is {BUCKET_BYTES}."
        )
    readers = [targets] if isinstance(targets, _Target) else list(targets)
    held = [_held(source, convert) for source in sources]
    kinds = _kinds(sources if convert is None else [convert.targets])
    wants = tuple(_wants(reader) for reader in readers)
    manifests = [reader if isinstance(reader, Manifest) else reader.sources for reader in readers]
    pairs = zip(manifests, wants, strict=True)
    target = union([Manifest(tuple((n, m[n]) for n in boxes), m.recipe) for m, boxes in pairs])
    _check(sources, kinds, target, wants)
    bare = Plan(target, len(sources), wants, bucket_bytes, ())
    chosen = _share_out(_cells(held, bare), bare)
    place = {name: index for index, name in enumerate(target)}
    buckets = []
    for (rank, who), boxes in sorted(chosen.items()):
        boxes.sort(key=lambda b: (-target[b[0]].dtype.itemsize, place[b[0]], b[1].offsets))
        buckets += [
            Bucket(rank, who, packed(target, run)) for run in _runs(boxes, target, bucket_bytes)
        ]
    unsent = () if convert else tuple(name for name in kinds if name not in target)
    return Plan(target, len(sources), wants, bucket_bytes, tuple(buckets), unsent)


def _held(source: Manifest, convert: Wiring | None) -> dict[str, list[Shard]]:
    held: dict[str, list[Shard]] = defaultdict(list)
    if convert is None:
        return {name: [spec.layout.shard] for name, spec in source.items()}
    for piece in convert.map(source):
        held[piece.target].append(piece.target_box)
    return held


def _wants(reader: _Target) -> Boxes:
    if isinstance(reader, Manifest):
        return {name: (spec.layout.shard,) for name, spec in reader.items()}
    if isinstance(reader, Reads):
        return reader.boxes
    boxes: dict[str, list[Shard]] = defaultdict(list)
    for piece in reader.pieces:
        boxes[piece.source].append(piece.source_box)
    # In the checkpoint's order, tensors that are encoded from one parameter follow each other. So
    # `Parts` encodes the parameter once.
    return {
        name: tuple(cell for cell, _ in owned_boxes(enumerate(boxes[name]), spec.shape)[0])
        for name, spec in reader.sources.items()
        if name in boxes
    }


def _kinds(manifests: Iterable[Manifest]) -> dict[str, dict[TensorSpec, int]]:
    """Return, for each name, its dtypes and shapes, and the first rank that has each of them."""
    kinds: dict[str, dict[TensorSpec, int]] = defaultdict(dict)
    for rank, manifest in enumerate(manifests):
        for name, spec in manifest.items():
            kinds[name].setdefault(spec.whole(), rank)
    return kinds


def _check(
    sources: Sequence[Manifest],
    kinds: Mapping[str, Mapping[TensorSpec, int]],
    target: Manifest,
    wants: Sequence[Boxes],
) -> None:
    wanted = sum(box.numel for boxes in wants for row in boxes.values() for box in row)
    if not sources or not wanted:
        raise PlanError(
            f"there is nothing to plan: {len(sources)} sources, {len(wants)} readers that want "
            f"{wanted} elements. Pass at least one source, and a reader that wants a tensor."
        )
    recipes = sorted({source.recipe for source in sources})
    if recipes != [target.recipe]:
        raise PlanError(
            f"the trainer encodes with recipe {' and '.join(map(repr, recipes))}, but readers "
            f"expect {target.recipe!r}. Give both the same recipe."
        )
    missing = [name for name in target if name not in kinds]
    if missing:
        raise PlanError(
            f"no rank holds {len(missing)} of {len(target)} target tensors: "
            f"{', '.join(missing[:3])}. The trainer has {len(kinds)} names, "
            f"such as {', '.join(sorted(kinds)[:3])}. Rename one side, or leave those tensors out "
            "of the targets."
        )
    for name, spec in target.items():
        for have, rank in kinds[name].items():
            _check_pair(name, rank, have, spec)


def _check_pair(name: str, rank: int, have: TensorSpec, want: TensorSpec) -> None:
    if have.shape != want.shape:
        raise PlanError(
            f"{name!r} is {have.shape} on rank {rank} and {want.shape} in the target. "
            "Pass convert=, or reshape the tensor before you describe it."
        )
    if not converts(have.dtype, want.dtype):
        raise PlanError(
            f"{name!r} is {have.dtype} on rank {rank} and {want.dtype} in the target. Only "
            f"{', '.join(str(d) for d in FLOATS)} are converted. Use the same dtype on both sides."
        )


def _cells(held: Sequence[Mapping[str, list[Shard]]], bare: Plan) -> Iterator[tuple[str, _Cell]]:
    # The layouts of layers repeat, so equal layouts are intersected once.
    alike: dict[object, list[_Cell]] = {}
    for name, spec in bare.target.items():
        have = tuple((rank, box) for rank, boxes in enumerate(held) for box in boxes.get(name, ()))
        want = tuple(
            (reader, box) for reader, boxes in enumerate(bare.wants) for box in boxes.get(name, ())
        )
        key = (have, want, spec)
        if key not in alike:
            limit = bare.bucket_bytes // spec.dtype.itemsize
            alike[key] = list(_intersect(name, have, want, spec.shape, limit))
        for cell in alike[key]:
            yield name, cell


def _intersect(
    name: str,
    have: tuple[tuple[int, Shard], ...],
    want: tuple[tuple[int, Shard], ...],
    shape: tuple[int, ...],
    limit: int,
) -> Iterator[_Cell]:
    owned, uncovered = owned_boxes(have, shape)
    for wanted, readers in owned_boxes(want, shape)[0]:
        missing = [box for cell in uncovered if (box := cell.intersect(wanted)) is not None]
        if missing:
            raise PlanError(
                f"no rank holds {sum(box.numel for box in missing)} of {wanted.numel} elements of "
                f"{name!r} that reader {readers[0]} wants; the first such box is {missing[0]}. "
                "Pass the manifest of every trainer rank."
            )
        for cell, holders in owned:
            box = cell.intersect(wanted)
            if box is not None:
                for piece in cut(box, limit):
                    yield piece, holders, readers


def _share_out(
    cells: Iterable[tuple[str, _Cell]], bare: Plan
) -> dict[tuple[int, tuple[int, ...]], list[tuple[str, Shard]]]:
    """Return the boxes that a rank writes for readers, by (rank, readers)."""
    loads = [0] * bare.world_size
    chosen: dict[tuple[int, tuple[int, ...]], list[tuple[str, Shard]]] = defaultdict(list)
    shared: list[tuple[int, str, _Cell]] = []
    for name, cell in cells:
        box, holders, readers = cell
        # Over a process group, the rank sends the box once per reader.
        size = box.numel * bare.target[name].dtype.itemsize * len(readers)
        if len(holders) > 1:
            shared.append((size, name, cell))
        else:
            loads[holders[0]] += size
            chosen[holders[0], readers].append((name, box))
    # Largest first, so that small boxes at the end level out the ranks.
    shared.sort(key=lambda item: -item[0])
    for size, name, (box, holders, readers) in shared:
        rank = min(holders, key=lambda rank: (loads[rank], rank))
        loads[rank] += size
        chosen[rank, readers].append((name, box))
    return chosen


def _runs(
    boxes: Iterable[tuple[str, Shard]], target: Manifest, limit: int
) -> Iterator[list[tuple[str, Shard]]]:
    run: list[tuple[str, Shard]] = []
    filled = 0
    for name, box in boxes:
        size = box.numel * target[name].dtype.itemsize
        if filled + size > limit:
            yield run
            run, filled = [], 0
        run.append((name, box))
        filled += size
    if run:
        yield run
