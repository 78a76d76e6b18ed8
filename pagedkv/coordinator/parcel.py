"""A snapshot as bytes: what a worker says of a sequence to the one that goes on with it."""

import base64
import dataclasses
import json

import numpy as np

from ..snapshot import Snapshot


def packed(snapshot: Snapshot) -> bytes:
    """A snapshot as JSON; arrays in base64."""
    fields = {f.name: getattr(snapshot, f.name) for f in dataclasses.fields(snapshot)}
    return json.dumps({name: _plain(value) for name, value in fields.items()}).encode()


def unpacked(data: bytes) -> Snapshot:
    """The snapshot that `packed` was given."""
    fields = {name: _array(value) for name, value in json.loads(data).items()}
    return Snapshot(**{**fields, "seq_ids": tuple(fields["seq_ids"])})


def _plain(value):
    if not isinstance(value, np.ndarray):
        return value
    return {
        "dtype": value.dtype.str,
        "shape": value.shape,
        "data": base64.b64encode(value.tobytes()).decode(),
    }


def _array(value):
    if not isinstance(value, dict):
        return value
    return np.frombuffer(base64.b64decode(value["data"]), value["dtype"]).reshape(value["shape"])
