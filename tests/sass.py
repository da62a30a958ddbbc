"""Float8 codes followed byte by byte through SASS, from their conversion to their stores."""

import re

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,5})\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;")
_REGISTER = re.compile(r"R(\d+)$")
# A jump over the slow path of a division, which numbers as they are do not take.
_SLOW = re.compile(r"BRA `\((\S+)\) ;(?:(?!BRA).)*?\bCALL\b(?:(?!BRA).)*?\n\1:", re.DOTALL)


def stored_codes(sass):
    """Return labels of bytes: [words stored to global memory, words stored to shared memory].

    Only words with a code are returned. A label is `("code", origin)`, where origin is
    `("loaded", address, byte)` of the instruction that loaded the number, as far as that can be
    followed; `("shared", address, byte)` after a way through shared memory; anything else is no
    code. An instruction that is not known makes bytes that are no codes.
    """
    held, stores = {}, {"STG": [], "STS": []}
    for line in _SLOW.sub("", sass).splitlines():
        if found := _LINE.match(line):
            _step(*found.groups(), held, stores)
    return [[word for word in stores[kind] if any(map(is_code, word))] for kind in ("STG", "STS")]


def is_code(label):
    return label[0] in ("code", "shared")


def _step(address, predicate, operation, arguments, held, stores):
    name, *kinds = operation.split(".")
    split = re.split(r",\s*(?![^\[]*\])", arguments)
    parts = [re.sub(r"\.(reuse|64|U32|H0_H0)$", "", part.strip()) for part in split]

    def at(text, index=0):
        if text == "RZ":
            return [("zero",)] * 4
        if not (register := _REGISTER.match(text)):
            return [("other", text)] * 4
        number = int(register[1]) + index
        return held.get(number, [("unset", number)] * 4)

    if name in ("STG", "STS", "STSM"):
        count, small = _width(name, kinds)
        word = [byte for i in range(count) for byte in at(parts[-1], i)]
        stores["STG" if name == "STG" else "STS"].append(word[:small] if count == 1 else word)
        return
    if name in ("SHFL", "LOP3") and not _REGISTER.match(parts[0]):
        parts = parts[1:]  # A predicate.
    if not parts or not (target := _REGISTER.match(parts[0])):
        return
    target = int(target[1])
    if name in ("LDG", "LDS", "LDSM"):
        count, small = _width(name, kinds)
        kind = "loaded" if name == "LDG" else "shared"
        for i in range(count):
            word = [(kind, address, 4 * i + byte) for byte in range(4)]
            held[target + i] = word if count > 1 or small == 4 else _padded(word[:small])
        return
    made = None if predicate else _moved(name, kinds, parts[1:], at)
    wide = {"64", "WIDE", "F64"} & set(kinds[:1]) or name[0] == "D" or name == "CS2R"
    for i in range(2 if wide else 1):
        held[target + i] = made or [("made", address, i)] * 4


def _moved(name, kinds, operands, at):
    """Return the bytes of what only moves bytes or converts; None of anything else."""
    if name == "F2FP" and "E4M3" in kinds:
        high, low, rest = (at(x) for x in operands[:3])
        return [("code", low[3]), ("code", high[3]), *rest[:2]]
    if name == "FMUL":  # Times a scale: a number keeps the place where it was loaded.
        found = [x for x in map(at, operands) if x[3][0] == "loaded"]
        return [found[0][3]] * 4 if len(found) == 1 else None
    if name == "MOV" or (name == "IMAD" and "MOV" in kinds):
        return at(operands[-1 if name == "IMAD" else 0])
    if name == "CS2R":
        return at("RZ")
    if name == "LOP3" and operands[2:4] == ["RZ", "0xfc"]:  # Or: of one that is zero, the other.
        pairs = list(zip(at(operands[0]), at(operands[1]), strict=True))
        joined = [a if b == ("zero",) else b for a, b in pairs]
        return joined if all(("zero",) in pair for pair in pairs) else None
    return _rearranged(name, kinds, operands, at)


def _rearranged(name, kinds, operands, at):
    """The same of operations with a number of their own: permute, mask and shift."""
    if len(operands) < 3 or not operands[1].startswith("0x"):
        return None
    x, number, other = at(operands[0]), int(operands[1], 16), operands[2]
    zeros = [("zero",)] * 4
    made = None
    if name == "PRMT" and not number & 0x8888:
        both = x + at(other)
        made = [both[number >> 4 * i & 7] for i in range(4)]
    elif name == "LOP3" and "0xc0" in operands:
        masks = [number >> 8 * i & 255 for i in range(4)]
        if set(masks) <= {0, 255}:
            made = [byte if mask else ("zero",) for byte, mask in zip(x, masks, strict=True)]
    elif name == "SHF" and kinds[0] == "R" and operands[0] == "RZ" and number % 8 == 0:
        made = (at(other) + zeros)[number // 8 :][:4]
    elif other == "RZ" and (name, *kinds[:1]) in {("SHF", "L"), ("IMAD", "U32"), ("IMAD", "SHL")}:
        bits = number if name == "SHF" else number.bit_length() - 1
        if bits % 8 == 0 and (name == "SHF" or number == 1 << bits):
            made = (zeros[: bits // 8] + x)[:4]
    return made


def _padded(word):
    return word + [("zero",)] * (4 - len(word))


def _width(name, kinds):
    """Registers of a load or store, and bytes of the only one."""
    if name in ("STSM", "LDSM"):
        return next((int(x[-1]) for x in kinds if re.fullmatch(r"M(T?)88\.?[24]", x)), 1), 4
    sizes = {"128": (4, 4), "64": (2, 4), "U8": (1, 1), "S8": (1, 1), "U16": (1, 2), "S16": (1, 2)}
    return next((sizes[x] for x in kinds if x in sizes), (1, 4))
