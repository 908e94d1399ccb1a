"""A leaf of the log: one stored event, canonically.

Layout, version 1 (integers big-endian, unsigned):

| bytes | what |
|---|---|
| 1 | kind: 1 = event, 2 = hole |
| 8 | sequence in the stream |
| 8 | the bus's stamp in nanoseconds since 1970 (0 for a hole) |
| 2 | length of the subject |
| n | subject (UTF-8; empty for a hole) |
| rest | the exact payload (empty for a hole) |

A leaf has at most 65,535 bytes, as an entry of a C2SP tlog-tiles bundle must.
"""

import struct

from msgspec import Struct

from waterclock_proto.names import I64_MAX

LEAF_BYTES_MAX = 65_535
KIND_EVENT = 1
KIND_HOLE = 2

_HEAD = struct.Struct(">BQQH")


class Leaf(Struct, frozen=True, kw_only=True):
    """One position of the tape. A hole says that nothing is known about its sequence."""

    sequence: int
    stored_ns: int = 0
    subject: str = ""
    payload: bytes = b""
    hole: bool = False


class LeafRefused(ValueError):
    """Bytes are not a leaf; says what was expected and what was found."""


def encode_leaf(leaf: Leaf) -> bytes:
    """The canonical bytes; what is hashed later.

    Raises:
        LeafRefused: longer than ``LEAF_BYTES_MAX``, a hole with contents, a sequence or stamp
            that no stream has, or a subject that is not Unicode text.
    """
    try:
        subject = leaf.subject.encode()
    except UnicodeEncodeError as error:
        raise LeafRefused(f"subject at {leaf.sequence} is not Unicode text: {error}") from error
    _check_numbers(leaf.sequence, leaf.stored_ns)
    if leaf.hole and (subject or leaf.payload or leaf.stored_ns):
        raise LeafRefused(f"a hole at {leaf.sequence} must be empty")
    # Before packing: the head's length field has no room for a longer subject.
    _check_size(_HEAD.size + len(subject) + len(leaf.payload))
    kind = KIND_HOLE if leaf.hole else KIND_EVENT
    head = _HEAD.pack(kind, leaf.sequence, leaf.stored_ns, len(subject))
    return head + subject + leaf.payload


def decode_leaf(encoded: bytes) -> Leaf:
    """The inverse of ``encode_leaf``; accepts exactly its outputs.

    Raises:
        LeafRefused: anything else.
    """
    if len(encoded) < _HEAD.size:
        raise LeafRefused(f"leaf of {len(encoded)} bytes, at least {_HEAD.size} expected")
    _check_size(len(encoded))
    kind, sequence, stored_ns, subject_bytes = _HEAD.unpack_from(encoded)
    body = encoded[_HEAD.size :]
    if kind not in (KIND_EVENT, KIND_HOLE):
        raise LeafRefused(f"leaf of kind {kind}, expected {KIND_EVENT} or {KIND_HOLE}")
    _check_numbers(sequence, stored_ns)
    if len(body) < subject_bytes:
        raise LeafRefused(f"leaf names a subject of {subject_bytes} bytes, {len(body)} are there")
    if kind == KIND_HOLE and (body or stored_ns):
        raise LeafRefused(f"a hole at {sequence} must be empty")
    try:
        subject = body[:subject_bytes].decode()
    except UnicodeDecodeError as error:
        raise LeafRefused(f"subject at {sequence} is not UTF-8: {error}") from error
    return Leaf(
        sequence=sequence,
        stored_ns=stored_ns,
        subject=subject,
        payload=body[subject_bytes:],
        hole=kind == KIND_HOLE,
    )


def _check_size(size: int) -> None:
    if size > LEAF_BYTES_MAX:
        raise LeafRefused(f"leaf of {size} bytes, at most {LEAF_BYTES_MAX} allowed")


def _check_numbers(sequence: int, stored_ns: int) -> None:
    if not 1 <= sequence <= I64_MAX:
        raise LeafRefused(f"leaf at sequence {sequence}, expected 1 to {I64_MAX}")
    if not 0 <= stored_ns <= I64_MAX:
        raise LeafRefused(f"leaf at {sequence} stored at {stored_ns} ns, expected 0 to {I64_MAX}")
