"""Read protocol buffers without their schema.

XLA describes compiled modules and their memory in protocol buffers, and no package that we depend
on has their descriptors. The readers of this folder name the numbers of the fields that they read,
and the file of XLA's sources that declares them. The format is described at
https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: The fields of a message by number, each with its values in order: an integer, or the bytes of a
#: text, a message or packed numbers.
Message = dict[int, list[Any]]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def message(data: bytes) -> Message:
    """Return the fields of a message.

    Fixed-width numbers are returned as bytes.

    Raises:
        ValueError: If the data are not a message.
    """
    try:
        return _fields(data)
    except IndexError:
        raise ValueError("the message is cut off") from None


def _fields(data: bytes) -> Message:
    found: Message = {}
    position, end = 0, len(data)
    while position < end:
        key = data[position]
        position += 1
        if key > 0x7F:
            key, position = _varint(data, position - 1)
        kind = key & 7
        value: int | bytes
        if kind == _VARINT:
            value = data[position]
            position += 1
            if value > 0x7F:
                value, position = _varint(data, position - 1)
        else:
            if kind == _BYTES:
                size, position = _varint(data, position)
            elif kind == _FIXED64:
                size = 8
            elif kind == _FIXED32:
                size = 4
            else:
                raise ValueError(f"no wire type has number {kind}")
            value = data[position : position + size]
            position += size
        if (field := key >> 3) in found:
            found[field].append(value)
        else:
            found[field] = [value]
    if position != end:
        raise ValueError("the message is cut off")
    return found


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the integer at a position, and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def integer(fields: Message, number: int, default: int = 0) -> int:
    """Return an integer field; negative ones are read as 64 bits."""
    values = fields.get(number)
    if not values:
        return default
    value: int = values[-1]
    return value - (1 << 64) if value >= 1 << 63 else value


def text(fields: Message, number: int) -> str:
    """Return a text field, "" if it is missing."""
    values = fields.get(number)
    return values[-1].decode(errors="replace") if values else ""


def integers(fields: Message, number: int) -> list[int]:
    """Return a repeated integer field, packed or not."""
    found: list[int] = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            found.append(value)
            continue
        position = 0
        while position < len(value):
            each, position = _varint(value, position)
            found.append(each)
    return [each - (1 << 64) if each >= 1 << 63 else each for each in found]


def submessage(fields: Message, number: int) -> Message:
    """Return a message field, empty if it is missing."""
    values = fields.get(number)
    return message(values[-1]) if values else {}


def submessages(fields: Message, number: int) -> list[Message]:
    """Return a repeated message field."""
    values: Sequence[bytes] = fields.get(number, ())
    return [message(each) for each in values]
