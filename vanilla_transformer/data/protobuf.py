"""Reads protocol buffers without their library or a description of their fields.

https://protobuf.dev/programming-guides/encoding
"""

from collections.abc import Iterator
from typing import Any

# Bytes of values of a fixed size, by wire type.
SIZES = {1: 8, 5: 4}


def read_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number of each field of a message and its value: an integer, or the bytes of any
    other type.

    Raises:
        ValueError: The bytes are not a message, or are cut off.
    """
    position = 0
    while position < len(message):
        tag, position = read_varint(message, position)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, position = read_varint(message, position)
            yield number, value
            continue
        if wire not in (*SIZES, 2):
            raise ValueError(f"no protocol buffer has a field of type {wire}")
        size = SIZES.get(wire)
        if size is None:
            size, position = read_varint(message, position)
        if position + size > len(message):
            raise ValueError("a field goes past the end")
        yield number, message[position : position + size]
        position += size


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """An integer in groups of seven bits, and the position after it.

    Raises:
        ValueError: It is cut off, or has more than 64 bits.
    """
    value = 0
    for shift in range(0, 64, 7):
        if position >= len(data):
            raise ValueError("an integer goes past the end")
        byte, position = data[position], position + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("an integer has more than 64 bits")
