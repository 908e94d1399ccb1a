"""The fold on disk, so that a restart need not read the tape from its beginning.

A snapshot says what had been folded up to one position, and nothing of what was intended or
heard. It is a convenience: whatever is wrong with it, it is discarded, and the tape is folded
again. ``sha256`` is of the payload at its position: a tape that says something else there is
another tape, or was rolled back and has grown again.
"""

import hashlib
import os
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, structs

from waterclock_scheduler.state import Seen, TapeState

VERSION: Final = 1
"""Of the fold's rules and of its shape. Another version's snapshot is discarded."""
_MASK_BYTES_MAX: Final = 1 << 16


class StoredSeen(Struct, frozen=True, array_like=True):
    """A writer's counters; the mask is too wide for an integer of the encoding."""

    newest: int
    mask: bytes
    position: int


class Snapshot(Struct, frozen=True, kw_only=True):
    """What is written."""

    version: int
    sha256: str
    """Of the payload at ``state.position``, in hex."""
    state: TapeState
    """Without ``writers``."""
    writers: dict[str, StoredSeen]


class Unusable(Struct, frozen=True):
    """Why there is no snapshot to begin with."""

    reason: str
    missing: bool = False
    """There never was one: nothing to worry about."""


def freeze(state: TapeState, payload: bytes) -> bytes:
    """The snapshot of ``state``; ``payload`` is that of the event at its position."""
    return _ENCODER.encode(
        Snapshot(
            version=VERSION,
            sha256=hashlib.sha256(payload).hexdigest(),
            state=structs.replace(state, writers={}),
            writers={
                name: StoredSeen(
                    seen.newest,
                    seen.mask.to_bytes((seen.mask.bit_length() + 7) // 8, "little"),
                    seen.position,
                )
                for name, seen in state.writers.items()
            },
        )
    )


def thaw(frozen: bytes) -> Snapshot | Unusable:
    """The snapshot in ``frozen``, its state whole again."""
    try:
        version = _VERSION_DECODER.decode(frozen).version
        if version != VERSION:
            return Unusable(f"version {version}, expected {VERSION}")
        snapshot = _DECODER.decode(frozen)
    except msgspec.MsgspecError as error:
        return Unusable(f"not a snapshot: {error}")
    for name, stored in snapshot.writers.items():
        if len(stored.mask) > _MASK_BYTES_MAX:
            return Unusable(f"writer {name} has a mask of {len(stored.mask)} bytes")
        snapshot.state.writers[name] = Seen(
            newest=stored.newest,
            mask=int.from_bytes(stored.mask, "little"),
            position=stored.position,
        )
    return snapshot


def write(path: Path, frozen: bytes) -> None:
    """Replace the snapshot. After a crash at any point the old one stands there, or the new one.

    Raises:
        OSError: it could not be written; the old one still stands.
    """
    temporary = path.with_name(f"{path.name}.new")
    with temporary.open("wb") as file:
        file.write(frozen)
        file.flush()
        os.fsync(file.fileno())
    # The content is on the disk; only now may the name point to it.
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path) -> Snapshot | Unusable:
    """The snapshot at ``path``, as far as it can be judged without the tape."""
    try:
        frozen = path.read_bytes()
    except FileNotFoundError:
        return Unusable("no snapshot yet", missing=True)
    except OSError as error:
        return Unusable(f"cannot be read: {error.strerror}")
    return thaw(frozen)


def why_not(snapshot: Snapshot, *, first: int, last: int, payload: bytes | None) -> str | None:
    """Why the snapshot does not fit the tape; None if it does.

    Args:
        snapshot: what was read.
        first: the first sequence that the tape still has.
        last: its last one; ``first - 1`` if it is empty.
        payload: what stands at the snapshot's position; None if nothing does.
    """
    position = snapshot.state.position
    if position > last:
        return f"it was made at {position}, but the tape ends at {last}"
    if payload is not None:
        found = hashlib.sha256(payload).hexdigest()
        if found != snapshot.sha256:
            return (
                f"at {position} it saw a payload with SHA-256 {snapshot.sha256}, found {found}:"
                " this is another tape"
            )
        return None
    if first > position + 1:
        return f"it was made at {position}, but the tape begins at {first}: events are missing"
    return None


class _Versioned(Struct):
    version: int


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Snapshot)
_VERSION_DECODER: Final = msgspec.msgpack.Decoder(_Versioned)
