"""TensorFlow's V2 checkpoints ("tensor bundles"), read without TensorFlow.

A checkpoint `model.ckpt-N` is an index, a LevelDB table from a tensor's name to a protocol buffer
with its dtype, shape and place, and the tensors' bytes in `model.ckpt-N.data-0000s-of-0000n`.

Sources: tensorflow/core/protobuf/tensor_bundle.proto, tensorflow/core/util/tensor_bundle, and the
table format of LevelDB, https://github.com/google/leveldb/blob/main/doc/table_format.md
"""

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.protobuf import read_fields, read_varint

MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
FOOTER_SIZE, TRAILER_SIZE = 48, 5
# DataType in tensorflow/core/framework/types.proto
DTYPES = {
    1: torch.float32, 2: torch.float64, 3: torch.int32, 4: torch.uint8, 5: torch.int16,
    6: torch.int8, 9: torch.int64, 10: torch.bool, 14: torch.bfloat16, 19: torch.float16,
}  # fmt: skip
MOST_DIMENSIONS = 254


def is_index(path: Path) -> bool:
    """Whether the file ends like the index of a TensorFlow checkpoint."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - len(MAGIC), 0))
        return size >= FOOTER_SIZE and file.read() == MAGIC


class TensorFlowCheckpoint(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint by name. Each is mapped from its file and read when it is used.

    Args:
        prefix: Path of the checkpoint without `.index`, such as `folder/model.ckpt-250000`.

    Raises:
        FileNotFoundError: A file of the checkpoint is missing.
        ValueError: A file is truncated, damaged or in an unknown format. Sizes are checked for all
            tensors, checksums only for the index.
    """

    def __init__(self, prefix: Path):
        self.prefix, self.index = prefix, prefix.with_name(f"{prefix.name}.index")
        try:
            self._read_index()
        except ValueError as error:
            raise ValueError(f"{self.index}: {error}") from error

    def _read_index(self) -> None:
        entries = dict(_read_table(self.index.read_bytes()))
        if b"" not in entries:
            raise ValueError("expected the header of a TensorFlow checkpoint")
        header = dict(read_fields(entries.pop(b"")))
        if header.get(2, 0) != 0:
            raise ValueError("the checkpoint is big-endian: expected little-endian")
        self.shards = [self._shard(shard, header.get(1, 0)) for shard in range(header.get(1, 0))]
        names = {key.decode(errors="replace"): entry for key, entry in entries.items()}
        self.entries = {name: self._entry(name, entry) for name, entry in names.items()}

    def _shard(self, shard: int, shards: int) -> Path:
        path = self.prefix.with_name(f"{self.prefix.name}.data-{shard:05}-of-{shards:05}")
        if not path.exists():
            raise FileNotFoundError(f"{path}: expected it next to {self.index.name}")
        return path

    def _entry(self, name: str, entry: bytes) -> dict[str, Any]:
        """The properties of a tensor, checked against the files."""
        fields: dict[int, Any] = {4: 0, 5: 0, 3: 0}
        shape: list[int] = []
        for field, value in read_fields(entry):
            if field == 2:
                dimensions = [v for f, v in read_fields(value) if f == 2]
                shape = [dict(read_fields(d)).get(1, 0) for d in dimensions]
            fields[field] = value
        shard, offset, size = fields[3], fields[4], fields[5]
        dtype = DTYPES.get(fields.get(1, 0))
        if 7 in fields:
            raise ValueError(f"{name} is saved in slices: expected a whole tensor")
        if len(shape) > MOST_DIMENSIONS or shard >= len(self.shards):
            raise ValueError(f"{name}, shape={shape}, shard={shard}: the file is damaged")
        if dtype is not None and math.prod(shape) * dtype.itemsize != size:
            raise ValueError(f"{name}, shape={shape}, {dtype}: expected {size} bytes")
        available = self.shards[shard].stat().st_size
        if offset + size > available:
            raise ValueError(
                f"{self.shards[shard]} is truncated: expected at least {offset + size} bytes for "
                f"{name}, found {available}"
            )
        return {"dtype": dtype, "shape": shape, "shard": shard, "offset": offset, "size": size}

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        if entry["dtype"] is None:
            raise ValueError(f"{self.index}: {name} holds no numbers: expected a tensor of numbers")
        if not entry["size"]:
            return torch.empty(entry["shape"], dtype=entry["dtype"])
        # Mapped copy-on-write, because torch needs writable memory.
        place = {"offset": entry["offset"], "shape": (entry["size"],)}
        raw = np.memmap(self.shards[entry["shard"]], np.uint8, "c", **place)
        return torch.from_numpy(raw).view(entry["dtype"]).reshape(entry["shape"])


def _read_table(table: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a LevelDB table."""
    if len(table) < FOOTER_SIZE or not table.endswith(MAGIC):
        raise ValueError(
            "truncated, or no index of a TensorFlow checkpoint: expected it to end in "
            f"{MAGIC.hex()}"
        )
    footer = table[-FOOTER_SIZE:]
    _, position = _handle(footer, 0)  # the meta-index, empty in checkpoints
    index, _ = _handle(footer, position)
    for _, handle in _read_block(table, *index):
        yield from _read_block(table, *_handle(handle, 0)[0])


def _handle(data: bytes, position: int) -> tuple[tuple[int, int], int]:
    """Offset and size of a block, and the position after them."""
    offset, position = read_varint(data, position)
    size, position = read_varint(data, position)
    return (offset, size), position


def _read_block(table: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a block. A key shares a prefix with the one before it; after the entries
    there is a list of restart points, with its length in the last four bytes."""
    block, trailer = table[offset : offset + size], table[offset + size :][:TRAILER_SIZE]
    if len(trailer) < TRAILER_SIZE or size < 4:
        raise ValueError(f"truncated: expected a block of {size} bytes at {offset}")
    kind, checksum = struct.unpack("<BI", trailer)
    if kind != 0:
        raise ValueError(f"a block is compressed ({kind}): expected none to be")
    if _masked_crc32c(block + trailer[:1]) != checksum:
        raise ValueError(f"damaged: the checksum of its block at {offset} is wrong")
    end = size - 4 * (struct.unpack("<I", block[-4:])[0] + 1)
    position, key = 0, b""
    while position < end:
        shared, position = read_varint(block, position)
        own, position = read_varint(block, position)
        length, position = read_varint(block, position)
        key = key[:shared] + block[position : position + own]
        position += own
        yield key, block[position : position + length]
        position += length


def _crc32c_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC32C = _crc32c_table()


def _masked_crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), rotated and shifted as LevelDB stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
