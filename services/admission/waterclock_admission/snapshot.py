"""The fold on disk, so that a restart reads only the end of the tape.

``fold.snapshot`` is 32 bytes of SHA-256 and then MessagePack; it names the files of the slices of
ended requests by their contents' hash. A slice that has not changed since the last time is not
written again. Files are written beside their place, synced and renamed, the one that names the
others last: at every moment a reader finds a whole snapshot, the old one or the new one. What
cannot be used for whatever reason is no snapshot, and the tape is read from its start.
"""

import hashlib
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from waterclock_admission.core import Rung
from waterclock_admission.fold import Fold, OpenRequest, Slice, Window
from waterclock_admission.ranges import Ranges

VERSION = 1
FILE = "fold.snapshot"


class SnapshotRefused(Exception):
    """Says what was expected and what was found."""


class Owed(Struct, frozen=True, array_like=True):
    """A final answer that admission owes and that was not stored yet."""

    end_sequence: int
    """Where the end stands on the tape."""
    admitted_sequence: int


class Restored(Struct, frozen=True, kw_only=True):
    """What ``load`` found."""

    fold: Fold
    last_payload: bytes
    """What stood on the tape at ``fold.position``."""
    last_stored_ns: int
    owed: tuple[Owed, ...]


class _SliceFile(Struct, frozen=True, array_like=True):
    name: int
    first_s: int
    last_s: int
    sha256: str


class _Image(Struct, frozen=True, kw_only=True):
    """Everything but the slices. Its version is raised whenever a field changes its meaning."""

    version: int
    position: int
    last_payload: bytes
    last_stored_ns: int
    owed: tuple[Owed, ...]
    now_us: int
    incarnation: str
    admission_fence: int
    admission_writer: str
    scheduler_fence: int
    numbers: dict[str, list[tuple[int, int]]]
    numbers_said_us: dict[str, int]
    decided: list[tuple[int, int]]
    recent: dict[int, tuple[int, int]]
    open: list[OpenRequest]
    cancelled_early: list[str]
    rungs: dict[str, Rung]
    contracts: dict[str, str]
    windows: dict[str, list[Window]]
    rung_marks: dict[str, tuple[str, int]]
    degrade_marks: dict[str, tuple[str, int]]
    slices: list[_SliceFile]


class Prepared(Struct, frozen=True, kw_only=True):
    """The bytes of one snapshot, no longer connected to the fold."""

    image: bytes
    slices: dict[str, bytes]
    """File name → contents, of those that changed."""
    wanted: frozenset[str]
    """All files that the image names."""


class Snapshots:
    """One folder of them. ``prepare`` is quick and on the loop; ``write`` may be on a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[int, str] = {}
        """Slice → its SHA-256 when it was last prepared."""

    def prepare(
        self, fold: Fold, *, last_payload: bytes, last_stored_ns: int, owed: tuple[Owed, ...]
    ) -> Prepared:
        """Copy the fold into bytes. The next call leaves out what has not changed since."""
        slices: dict[str, bytes] = {}
        files: list[_SliceFile] = []
        for part in fold.ended.slices:
            sha256 = self._names.get(part.name)
            if sha256 is None or part.changed:
                packed = part.packed()
                sha256 = hashlib.sha256(packed).hexdigest()
                slices[_slice_file(sha256)] = packed
                self._names[part.name] = sha256
                part.changed = False
            files.append(_SliceFile(part.name, part.first_s, part.last_s, sha256))
        kept = {part.name for part in fold.ended.slices}
        self._names = {name: sha256 for name, sha256 in self._names.items() if name in kept}
        image = _ENCODER.encode(
            _Image(
                version=VERSION,
                position=fold.position,
                last_payload=last_payload,
                last_stored_ns=last_stored_ns,
                owed=owed,
                now_us=fold.now_us,
                incarnation=fold.incarnation,
                admission_fence=fold.admission_fence,
                admission_writer=fold.admission_writer,
                scheduler_fence=fold.scheduler_fence,
                numbers={tenant: numbers.runs() for tenant, numbers in fold.numbers.items()},
                numbers_said_us=fold.numbers_said_us,
                decided=fold.decided.runs(),
                recent=fold.recent,
                open=list(fold.open.values()),
                cancelled_early=list(fold.cancelled_early),
                rungs=fold.rungs,
                contracts=fold.contracts,
                windows={
                    tenant: list(windows.values()) for tenant, windows in fold.windows.items()
                },
                rung_marks=fold.rung_marks,
                degrade_marks=fold.degrade_marks,
                slices=files,
            )
        )
        return Prepared(
            image=hashlib.sha256(image).digest() + image,
            slices=slices,
            wanted=frozenset(_slice_file(file.sha256) for file in files),
        )

    def write(self, prepared: Prepared) -> None:
        """Put a prepared snapshot in the place of the one before.

        Raises:
            OSError: it could not be written; the one before is still whole.
        """
        try:
            for name, contents in prepared.slices.items():
                self._put(name, contents)
            self._sync_folder()
            # From here on the slices are there; the image that names them makes them count.
            self._put(FILE, prepared.image)
            self._sync_folder()
        except OSError:
            self._names.clear()
            raise
        for path in self._folder.glob("slice-*"):
            if path.name not in prepared.wanted:
                path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Take the snapshot out of the way; it is of no use any more."""
        (self._folder / FILE).unlink(missing_ok=True)
        self._names.clear()

    def load(self, *, ended_requests_max: int) -> Restored | None:
        """The snapshot, or None if there is none.

        Raises:
            SnapshotRefused: there is one, and it cannot be used.
        """
        path = self._folder / FILE
        try:
            contents = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SnapshotRefused(f"{FILE}: {error.strerror}") from error
        image = self._decode(contents)
        fold = Fold(ended_requests_max=ended_requests_max)
        fold.position = image.position
        fold.now_us = image.now_us
        fold.incarnation = image.incarnation
        fold.admission_fence = image.admission_fence
        fold.admission_writer = image.admission_writer
        fold.scheduler_fence = image.scheduler_fence
        fold.numbers = {tenant: Ranges(runs) for tenant, runs in image.numbers.items()}
        fold.numbers_said_us = image.numbers_said_us
        fold.decided = Ranges(image.decided)
        fold.recent = image.recent
        fold.cancelled_early = dict.fromkeys(image.cancelled_early)
        fold.rungs = image.rungs
        fold.contracts = image.contracts
        fold.windows = {
            tenant: {window.start_us: window for window in windows}
            for tenant, windows in image.windows.items()
        }
        fold.rung_marks = image.rung_marks
        fold.degrade_marks = image.degrade_marks
        for request in image.open:
            fold.open[f"{request.tenant}.{request.id}"] = request
            fold.open_by_tenant[request.tenant] = fold.open_by_tenant.get(request.tenant, 0) + 1
        fold.ended.restore([self._load_slice(file) for file in image.slices])
        self._names = {file.name: file.sha256 for file in image.slices}
        return Restored(
            fold=fold,
            last_payload=image.last_payload,
            last_stored_ns=image.last_stored_ns,
            owed=image.owed,
        )

    def _decode(self, contents: bytes) -> _Image:
        if len(contents) < 32 or hashlib.sha256(contents[32:]).digest() != contents[:32]:
            raise SnapshotRefused(
                f"{FILE}: {len(contents)} bytes whose SHA-256 is not the one they begin with"
            )
        try:
            version = _VERSION_DECODER.decode(contents[32:]).version
            if version != VERSION:
                raise SnapshotRefused(f"{FILE}: version {version}, expected {VERSION}")
            return _DECODER.decode(contents[32:])
        except msgspec.MsgspecError as error:
            raise SnapshotRefused(f"{FILE}: {error}") from error

    def _load_slice(self, file: _SliceFile) -> Slice:
        name = _slice_file(file.sha256)
        try:
            packed = (self._folder / name).read_bytes()
            found = hashlib.sha256(packed).hexdigest()
            if found != file.sha256:
                raise SnapshotRefused(f"{name}: contents with SHA-256 {found}")
            records = Slice.unpacked(packed)
        except (OSError, ValueError) as error:
            raise SnapshotRefused(f"{name}: {error}") from error
        return Slice(
            name=file.name,
            first_s=file.first_s,
            last_s=file.last_s,
            records=records,
            changed=False,
        )

    def _put(self, name: str, contents: bytes) -> None:
        beside = self._folder / f"{name}.new"
        with beside.open("wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._folder / name)

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _Version(Struct):
    version: int


def _slice_file(sha256: str) -> str:
    return f"slice-{sha256}"


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Image)
_VERSION_DECODER = msgspec.msgpack.Decoder(_Version)
