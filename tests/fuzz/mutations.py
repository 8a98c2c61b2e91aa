"""Hostile files made of good ones: each function takes a random generator and the bytes of a file.

`mutated` is what others call. Half of what it does knows nothing of the format (bits, cuts,
splices); the rest knows where its numbers, lengths and offsets are, and what breaks readers.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import re
import struct
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

Random = random.Random
Mutation = Callable[[Random, bytes, Sequence[bytes]], bytes]

NUMBERS = (
    0, 1, 2, 3, 4, 7, 8, 12, 16, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 2**24,
    2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
    2**64 - 2, 2**64 - 2**31,
)  # fmt: skip
TEXTS = (
    b"", b"\xff\xfe", b"\xed\xa0\x80", b"a\0b", b"\x1b[31m\x07\x9b", b"../../etc/passwd",
    b"__proto__", b"constructor", b"toString", b"\xe2\x80\xae", b"x" * 5000, b"nan",
    b"1e999", b"\n\r\t",
)  # fmt: skip


def mutated(kind: str, chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return a file with a few changes; `others` are good files of the same kind."""
    structured = STRUCTURED.get(kind, ())
    for _ in range(chooser.choice((1, 1, 1, 1, 2, 2, 3, 8))):
        use = structured and chooser.random() < 0.6
        change = chooser.choice(structured if use else BYTES)
        with contextlib.suppress(RecursionError):  # it is nested too deep to be changed
            data = change(chooser, data, others)
    return data


# ---- bytes ---------------------------------------------------------------------------------------


def flip_bits(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(chooser.choice((1, 1, 1, 2, 8))):
        changed[chooser.randrange(len(changed))] ^= 1 << chooser.randrange(8)
    return bytes(changed)


def cut(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return data[: chooser.randrange(len(data) + 1)]


def remove(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    start, end = _span(chooser, data)
    return data[:start] + data[end:]


def repeat(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    start, end = _span(chooser, data)
    return data[:end] + data[start:end] * chooser.choice((1, 1, 2, 50)) + data[end:]


def fill(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    start, end = _span(chooser, data)
    return data[:start] + chooser.choice((b"\0", b"\xff", b"\x80")) * (end - start) + data[end:]


def splice(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = chooser.choice(others)
    start, end = _span(chooser, other)
    at, until = _span(chooser, data)
    return data[:at] + other[start:end] + data[chooser.choice((at, until)) :]


def insert_text(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at = chooser.randrange(len(data) + 1)
    return data[:at] + chooser.choice(TEXTS) + data[at:]


def set_number(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    size = chooser.choice((1, 2, 4, 8))
    if len(data) < size:
        return data
    at = chooser.randrange(len(data) - size + 1) // chooser.choice((1, size)) * chooser.choice((1,))
    return _put(data, at, size, chooser.choice(NUMBERS))


def add_to_number(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    size = chooser.choice((1, 2, 4, 8))
    if len(data) < size:
        return data
    at = chooser.randrange(len(data) - size + 1)
    number = int.from_bytes(data[at : at + size], "little")
    return _put(data, at, size, number + chooser.choice((-16, -4, -1, 1, 4, 16)))


def _put(data: bytes, at: int, size: int, number: int) -> bytes:
    return data[:at] + (number % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]


def _span(chooser: Random, data: bytes) -> tuple[int, int]:
    start = chooser.randrange(len(data) + 1)
    return start, min(len(data), start + chooser.choice((1, 2, 4, 8, 16, 64, 256)))


BYTES: tuple[Mutation, ...] = (
    flip_bits, flip_bits, cut, remove, repeat, fill, splice, insert_text, set_number, add_to_number,
)  # fmt: skip


# ---- FlatBuffers ---------------------------------------------------------------------------------
# Everything in a FlatBuffer is a 32-bit word that is an offset to what follows it, a length, or a
# number; and vtables of 16-bit words. What looks like an offset into the file is one, mostly.


def _offsets(data: bytes) -> list[int]:
    """Return the positions of words that lead to another place in the file."""
    words = struct.unpack_from(f"<{len(data) // 4}I", data)
    return [4 * i for i, word in enumerate(words) if 4 <= word < len(data) - 4 * i]


def turn_offset(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Let an offset lead to where another one does, to itself, before itself, or to the end."""
    places = _offsets(data)
    if not places:
        return data
    at, other = chooser.choice(places), chooser.choice(places)
    target = other + struct.unpack_from("<I", data, other)[0]
    end = len(data) - at
    where = (target - at, 0, 4, -4, end, end - 1, end - 4, other - at)
    return _put(data, at, 4, chooser.choice(where))


def swap_words(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    places = _offsets(data)
    if len(places) < 2:
        return data
    one, other = sorted(chooser.sample(places, 2))
    a, b = data[one : one + 4], data[other : other + 4]
    return data[:one] + b + data[one + 4 : other] + a + data[other + 4 :]


def change_length(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change the word that an offset leads to: the length of a vector, or the way to a vtable."""
    places = _offsets(data)
    if not places:
        return data
    at = chooser.choice(places)
    target = at + struct.unpack_from("<I", data, at)[0]
    if target + 4 > len(data):
        return data
    length = struct.unpack_from("<I", data, target)[0]
    numbers = (length - 1, length + 1, 2 * length, len(data), *NUMBERS)
    return _put(data, target, 4, chooser.choice(numbers))


def change_vtable(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change a 16-bit word of a vtable."""
    tables = []
    for at in _offsets(data):
        table = at + struct.unpack_from("<I", data, at)[0]
        if table + 4 <= len(data):
            vtable = table - struct.unpack_from("<i", data, table)[0]
            if 0 <= vtable <= len(data) - 4:
                tables.append(vtable)
    if not tables:
        return data
    vtable = chooser.choice(tables)
    size = struct.unpack_from("<H", data, vtable)[0]
    at = min(vtable + 2 * chooser.randrange(min(size, 32) // 2 + 1), len(data) - 2)
    return _put(data, at, 2, chooser.choice((0, 1, 2, 4, 6, 8, 12, 16, 0x7FFF, 0xFFFF, size)))


# ---- protobuf ------------------------------------------------------------------------------------

Field = list[Any]  # number, kind, value: an integer, bytes, or a list of fields


def _varint(value: int) -> bytes:
    value %= 1 << 64
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(10):
        byte = data[at + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise ValueError


def parse_protobuf(data: bytes, depth: int = 0) -> list[Field]:
    """Return the fields of a message; bytes that are a message are parsed too."""
    fields: list[Field] = []
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        value: Any
        if number == 0 or number > 1000:
            raise ValueError
        if kind == 0:
            value, at = _read_varint(data, at)
        elif kind == 2:
            size, at = _read_varint(data, at)
            if at + size > len(data):
                raise ValueError
            value, at = data[at : at + size], at + size
            # Short text parses as a message too, now and then: that is as good a mutation.
            with contextlib.suppress(ValueError, IndexError):
                value = parse_protobuf(value, depth + 1) if len(value) > 1 and depth < 8 else value
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            if at + size > len(data):
                raise ValueError
            value, at = data[at : at + size], at + size
        else:
            raise ValueError
        fields.append([number, kind, value])
    return fields


def write_protobuf(fields: list[Field]) -> bytes:
    """The reverse of `parse_protobuf`."""
    parts = []
    for number, kind, value in fields:
        content = write_protobuf(value) if isinstance(value, list) else value
        if isinstance(content, int):
            parts.append(_varint(number << 3 | kind) + _varint(content))
        elif kind == 2:
            parts.append(_varint(number << 3 | 2) + _varint(len(content)) + content)
        else:
            parts.append(_varint(number << 3 | kind) + content)
    return b"".join(parts)


def change_field(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change a field anywhere in the tree of messages; all lengths around it are right again."""
    try:
        root = parse_protobuf(data)
    except (ValueError, IndexError):
        return flip_bits(chooser, data, others)
    messages = [root]
    for message in messages:
        messages += [field[2] for field in message if isinstance(field[2], list)]
    message = chooser.choice([m for m in messages if m] or messages)
    if not message:
        return data
    place = chooser.randrange(len(message))
    number, kind, value = message[place]
    what = chooser.randrange(9)
    if what == 0:
        del message[place]
    elif what == 1:
        message[place:place] = [[number, kind, value]] * chooser.choice((1, 2, 30))
    elif what == 2:
        message[place] = [chooser.choice((1, 2, 3, 5, 8, 9, 13, 14, 15, 21)), kind, value]
    elif what == 3:
        message[place] = [number, 0, chooser.choice(NUMBERS)]
    elif what == 4:
        message[place] = [number, 2, chooser.choice(TEXTS)]
    elif what == 5:
        other = chooser.choice(messages)
        if other and other is not message:
            message[place] = list(chooser.choice(other))
    elif what == 6:
        chooser.shuffle(message)
    elif what == 7:  # deep nesting
        inner = write_protobuf(message)
        for _ in range(chooser.choice((2, 20, 300))):
            inner = _varint(number << 3 | 2) + _varint(len(inner)) + inner
            if len(inner) > 200_000:
                break
        message[place] = [number, 2, inner]
    elif isinstance(value, int):
        message[place] = [number, kind, value + chooser.choice((-1, 1, 2**32, -(2**31)))]
    elif isinstance(value, bytes):
        message[place] = [number, kind, flip_bits(chooser, value, others)]
    # A list that was put into itself cannot be written.
    try:
        return write_protobuf(root)
    except RecursionError:
        return data


# ---- JSON ----------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**400, -(10**400),
    0.5, -0.0, 1e308, 5e-324, math.nan, math.inf, -math.inf, "", "NaN", "Infinity", "-Infinity",
    "x", "0", "1e999", "\ud800", "\x1b[2J", "__proto__", "<f4", "<f8", "group0", "linear",
    "plateau", "cosine", [], {}, [[]], [None], {"": None}, {"__proto__": 1},
    {"constructor": {"prototype": 1}},
    [1e308] * 3, "x" * 3000, {"name": "linear"}, {"kind": "plateau", "state": {}},
)  # fmt: skip
KEYS = (
    "__proto__", "constructor", "prototype", "toString", "hasOwnProperty", "valueOf", "", "format",
    "state", "name", "kind", "seed", "step", "losses", "values", "\ud800", "length", "0",
)  # fmt: skip


def change_json(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change an entry anywhere in a JSON text, or how the text is written."""
    try:
        root = {"root": json.loads(data.decode("utf-8", "surrogatepass"))}
    except (ValueError, RecursionError):
        return flip_bits(chooser, data, others)
    places: list[tuple[Any, Any]] = [(root, "root")]
    for holder, key in places:
        inner = holder[key]
        if isinstance(inner, dict):
            places += [(inner, name) for name in inner]
        elif isinstance(inner, list):
            places += [(inner, index) for index in range(min(len(inner), 50))]
    holder, key = chooser.choice(places)
    what = chooser.randrange(8)
    if what < 3:
        holder[key] = chooser.choice(VALUES)
    elif what == 3 and holder is not root:
        del holder[key]
    elif what == 4 and isinstance(holder, dict):
        holder[chooser.choice(KEYS)] = chooser.choice((holder[key], *VALUES))
    elif what == 5:
        other, name = chooser.choice(places)
        holder[key] = json.loads(json.dumps(other[name]))
    elif what == 6:
        for _ in range(chooser.choice((3, 50, 1200))):
            holder[key] = chooser.choice(([holder[key]], {"a": holder[key]}))
    elif isinstance(holder[key], int | float) and abs(holder[key]) < 1e300:
        holder[key] = holder[key] * chooser.choice((-1, 2, 10**30, 0.5)) + chooser.choice((0, 1))
    try:
        text = json.dumps(root.get("root"), ensure_ascii=chooser.random() < 0.7)
    except (RecursionError, ValueError):
        return b"[" * 5000
    if chooser.random() < 0.1:  # a key twice, a big number, another spelling
        text = re.sub(r"\d+", lambda found: found[0] * chooser.choice((1, 1, 1, 40)), text)
    return text.encode("utf-8", "surrogatepass")


# ---- zip, .npz, .npy -----------------------------------------------------------------------------


def change_member(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change what is in an archive, which is a right archive again."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # a damaged archive: what zipfile raises depends on where
        return flip_bits(chooser, data, others)
    if not members:
        return data
    place = chooser.randrange(len(members))
    name, content = members[place]
    what = chooser.randrange(6)
    if what == 0:
        del members[place]
    elif what == 1:
        members.append((name, chooser.choice(members)[1]))
    elif what == 2:
        members[place] = (
            chooser.choice(("", "x.npy", "../x.npy", "\u202e.npy", "a" * 200)),
            content,
        )
    else:
        inner = BYTES if what == 3 else (change_header,)
        members[place] = (name, chooser.choice(inner)(chooser, content, [content]))
    target = io.BytesIO()
    method = chooser.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    import warnings

    with warnings.catch_warnings(), zipfile.ZipFile(target, "w", method) as archive:
        warnings.simplefilter("ignore")  # two of one name
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name or "x"), content, method)
    return target.getvalue()


def change_header(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change the text at the beginning of an array's file, and its length with it."""
    if data[:6] != b"\x93NUMPY" or len(data) < 12:
        return flip_bits(chooser, data, others)
    size = struct.unpack_from("<H", data, 8)[0]
    text, rest = data[10 : 10 + size], data[10 + size :]
    descriptions = (
        b"'<f8'", b"'|O'", b"'<U1000000000'", b"'|V0'", b"'>f4'", b"'<M8[s]'", b"[('a', '<f4')]",
        b"'<f4" + b"'", b"''", b"None", b"1", b"'<c16'", b"'|S0'", b"'<f16'", b"'|b1'",
    )  # fmt: skip
    shapes = (
        b"(1099511627776,)", b"(-1,)", b"()", b"(0,)", b"(4294967296, 4294967296)", b"(1,) * 3",
        b"(True,)", b"None", b"(" + b"1," * 70 + b")", b"(2**40,)", b"(3.5,)", b"((),)",
    )  # fmt: skip
    what = chooser.randrange(5)
    if what == 0:
        text = re.sub(rb"'descr': [^,]+,", b"'descr': " + chooser.choice(descriptions) + b",", text)
    elif what == 1:
        text = re.sub(rb"'shape': \([^)]*\)", b"'shape': " + chooser.choice(shapes), text)
    elif what == 2:
        text = text.replace(b"False", chooser.choice((b"True", b"None", b"1", b"'x'")))
    elif what == 3:
        text = chooser.choice(BYTES)(chooser, text, [text])
    else:
        text = b"{" * chooser.choice((1, 300)) + text
    version = bytes([chooser.choice((1, 1, 1, 2, 3, 9)), 0])
    return b"\x93NUMPY" + version + struct.pack("<H", len(text) % 65536) + text + rest


# ---- tables of text ------------------------------------------------------------------------------


def change_cell(chooser: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    lines = data.split(b"\n")
    row = chooser.randrange(len(lines))
    cells = lines[row].split(b",")
    odd = (
        b"", b"nan", b"inf", b"1e999", b'"', b'"a,b"', b"1" * 5000, b"\xff", b"\0", b"0x10", b"1_0",
        b"\xd9\xa3", b"-", b"9" * 30, b"cat",
    )  # fmt: skip
    cells[chooser.randrange(len(cells))] = chooser.choice(odd)
    lines[row] = b",".join(cells * chooser.choice((1, 1, 1, 2)))
    return chooser.choice((b"\n", b"\n", b"\r\n", b"\r")).join(lines)


STRUCTURED: dict[str, tuple[Mutation, ...]] = {
    "flatbuffers": (turn_offset, swap_words, change_length, change_vtable),
    "protobuf": (change_field,),
    "json": (change_json,),
    "zip": (change_member,),
    "npy": (change_header,),
    "table": (change_cell,),
}
