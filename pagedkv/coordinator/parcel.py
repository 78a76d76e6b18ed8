"""A snapshot as bytes: what a worker says of a sequence to the one that goes on with it."""

import dataclasses
import json
import struct

import numpy as np

from ..snapshot import Snapshot

HEAD = struct.Struct("<I")  # bytes of the description, which says what follows it


def packed(snapshot: Snapshot) -> bytes:
    """A snapshot: plain values and the kinds of its arrays in JSON, then the bytes of the arrays."""
    described, arrays = {}, []
    for field in dataclasses.fields(snapshot):
        value = getattr(snapshot, field.name)
        if isinstance(value, np.ndarray):
            arrays.append(value.tobytes())
            value = {"dtype": value.dtype.str, "shape": value.shape}
        described[field.name] = value
    text = json.dumps(described).encode()
    return b"".join([HEAD.pack(len(text)), text, *arrays])


def unpacked(data: bytes) -> Snapshot:
    """The snapshot that `packed` was given."""
    at = HEAD.size + HEAD.unpack_from(data)[0]
    fields = json.loads(data[HEAD.size : at])
    for name, value in fields.items():
        if isinstance(value, dict):
            dtype, shape = np.dtype(value["dtype"]), value["shape"]
            count = int(np.prod(shape))
            fields[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
            at += count * dtype.itemsize
    return Snapshot(**{**fields, "seq_ids": tuple(fields["seq_ids"])})
