"""Just enough of protobuf's wire format to leave the weights of a model file in place."""

from typing import Any

GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9
"""Field numbers in ModelProto, GraphProto and TensorProto; onnx.proto never changes them."""

_FIXED = {1: 8, 5: 4}
"""Bytes of a field by its wire type; 0 is one number, 2 a length and that many bytes."""


_MOST = 1 << 20
"""Fields that a message may have: a file of nothing but tiny ones would take hours."""


def parse(data: memoryview, number: int, message: Any) -> list[memoryview]:
    """Fill a message with all fields but one, and return the contents of that field unread."""
    found, rest, at, behind, count = [], [], 0, 0, 0
    while at < len(data):
        start, count = at, count + 1
        key, at = _varint(data, at)
        length, after = (0, at) if key & 7 in _FIXED else _varint(data, at)
        at = after + _FIXED.get(key & 7, length if key & 7 == 2 else 0)
        if at > len(data) or key & 7 in (3, 4) or not key >> 3:
            raise ValueError("a field goes beyond the end, has no number, or is a group")
        if count > _MOST:
            raise ValueError(f"it has more than {_MOST:,} fields")
        if key == number << 3 | 2:
            rest.append(data[behind:start])
            found.append(data[at - length : at])
            behind = at
    message.MergeFromString(b"".join([*rest, data[behind:]]))
    return found


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number that starts there, seven bits a byte, and where it ends."""
    number = shift = 0
    while shift < 70:
        number |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return number, at
    raise ValueError("a number of more than 64 bits")


def field(number: int, length: int) -> bytes:
    """How a field of that many bytes begins."""
    written = bytearray([number << 3 | 2])
    while length > 127:
        written.append(length & 127 | 128)
        length >>= 7
    return bytes([*written, length])
