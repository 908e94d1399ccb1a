"""The record on disk: append-only files of leaves, one folder for each incarnation.

    <data>/log/writer.lock                      held by the one process that appends
    <data>/log/<incarnation>/log.json           a ``LogHead``
    <data>/log/<incarnation>/synced             how far the newest file is known to be durable
    <data>/log/<incarnation>/leaves-<index>.bin 65,536 leaves from that index on

A leaf file is the concatenation of C2SP tlog-tiles entry bundles (256 entries each): for each
leaf its length as a big-endian uint16, then the leaf (``waterclock_proto.leaves``). So
``cat leaves-*.bin | sha256sum`` is the hash that a report states.

A file is full and durable before the next one is made. Therefore only the newest file can be
torn, and of it only what lies beyond the mark in ``synced``: the mark is written after the
data is durable, so it may be too small and is never too large. What lies beyond it is believed
as far as it can be read as events; the first thing that cannot is where the file is cut,
because after a power cut a file may have its length before it has its contents. Anything
wrong below the mark is damage, and is never repaired silently.

Readers take no lock and never write. They see what was appended before they opened the newest
file, whether the writer runs or not.
"""

import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from waterclock_proto.envelope import EventRefused, decode_event
from waterclock_proto.leaves import Leaf, LeafRefused, decode_leaf, encode_leaf
from waterclock_proto.names import Count, Name, OptionalName
from waterclock_proto.names import Sequence as TapeSequence
from waterclock_runtime.errors import WaterclockError

LEAVES_PER_FILE: Final = 65_536
"""256 bundles of 256 entries: about 60 MB of events, read in a tenth of a second."""
READ_BYTES: Final = 4 * 1024 * 1024
HOLES_PER_WRITE: Final = 65_536

_LENGTH_BYTES: Final = 2
_LEAF_HEAD_BYTES: Final = 19
_FILE_NAME: Final = re.compile(r"leaves-(\d{12})\.bin")
_MARK_TEXT: Final = re.compile(rb"file (\d{12}) bytes (\d{15})\n")


class LogDamaged(WaterclockError):
    """The record says something that no writer wrote: file, offset, what was expected and found."""

    def __init__(self, path: Path, offset: int, *, expected: str, found: str) -> None:
        super().__init__(
            f"{path} at byte {offset}: expected {expected}, found {found}. Put the file back from"
            " a copy, or move the folder of this incarnation away and keep it"
        )
        self.path = path
        self.offset = offset


class LogUnwritable(WaterclockError):
    """The disk refused. Nothing is known about the newest file until it is opened again."""


class LogLocked(WaterclockError):
    """Another process appends to this record."""


class LogMissing(WaterclockError):
    """There is no record where one was expected."""


class LogHead(Struct, frozen=True, kw_only=True):
    """``log.json``: which part of which tape a folder holds."""

    format: Literal["waterclock-leaves-1"] = "waterclock-leaves-1"
    ordinal: TapeSequence
    """Counts the incarnations of this record from 1."""
    incarnation: Name
    first_sequence: TapeSequence
    """The sequence of leaf 0."""
    reason: Literal["created", "rolled_back", "replaced"]
    """``rolled_back`` goes on with the tape of the incarnation before, from ``first_sequence``
    on; the two others begin a tape of their own."""
    previous_incarnation: OptionalName = ""
    previous_size: Count = 0
    """How many leaves the incarnation before had when it was closed."""
    announced_sequence: TapeSequence | None = None
    """Where its ``log_opened`` stands on the tape; absent until that is known."""


class LeafBatch(Struct, frozen=True):
    """Leaves that follow one another, and the bytes of the file that hold them."""

    leaves: list[Leaf]
    framed: bytes


class Torn(Struct, frozen=True):
    """What is cut, or passed over, at the end of the newest file."""

    path: Path
    offset: int
    """Where the last good leaf ends."""
    torn_bytes: int
    why: str


class IncarnationReader:
    """The leaves of one incarnation as they stand now. Iterate once.

    Raises (from iteration):
        LogDamaged: something below the mark, or in a file that is not the newest, is wrong.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.head = read_head(folder)
        self.torn: Torn | None = None
        """Set when iteration has come to an end that was not clean."""
        # First the mark, then the list of files: so the mark can be too old for the list, which
        # makes the reader lenient, but never too new, which would make it see damage.
        self._mark = _read_mark(folder)
        self._files = _list_files(folder, self._mark)

    def __iter__(self) -> Iterator[LeafBatch]:
        return self.batches()

    def batches(self, from_index: int = 0) -> Iterator[LeafBatch]:
        """From the first leaf of the file that holds ``from_index`` on."""
        for path, index in self._files:
            if index + LEAVES_PER_FILE <= from_index:
                continue
            scan = _Scan(path, first_sequence=self.head.first_sequence + index)
            if (path, index) != self._files[-1]:
                yield from scan.full()
            else:
                yield from scan.newest(_durable_bytes(path, index, self._mark))
                self.torn = scan.torn


def incarnations(data_dir: Path) -> list[LogHead]:
    """The heads of a record's incarnations, oldest first.

    Raises:
        LogDamaged: they do not follow one another.
    """
    root = data_dir / "log"
    if not root.is_dir():
        return []
    heads = sorted(
        (read_head(folder) for folder in root.iterdir() if _is_incarnation(folder)),
        key=lambda head: head.ordinal,
    )
    previous = ""
    for ordinal, head in enumerate(heads, start=1):
        if (head.ordinal, head.previous_incarnation) != (ordinal, previous):
            raise LogDamaged(
                root / head.incarnation / "log.json",
                0,
                expected=f"incarnation {ordinal} after {previous!r}",
                found=f"incarnation {head.ordinal} after {head.previous_incarnation!r}",
            )
        previous = head.incarnation
    return heads


def open_reader(data_dir: Path, head: LogHead) -> IncarnationReader:
    return IncarnationReader(data_dir / "log" / head.incarnation)


def effective_ends(heads: Sequence[LogHead]) -> list[int | None]:
    """For each incarnation the sequence from which on its tape was rolled back; None if never.

    What an incarnation holds from there on was on the tape once and is not any more.
    """
    ends: list[int | None] = [None] * len(heads)
    end: int | None = None
    for place in range(len(heads) - 1, -1, -1):
        ends[place] = end
        head = heads[place]
        if head.reason == "rolled_back":
            end = head.first_sequence if end is None else min(end, head.first_sequence)
        else:
            end = None
    return ends


def read_head(folder: Path) -> LogHead:
    """The head in a folder.

    Raises:
        LogDamaged: none there, or not one.
    """
    path = folder / "log.json"
    try:
        return _HEAD_DECODER.decode(path.read_bytes())
    except OSError as error:
        raise LogDamaged(
            path, 0, expected="the head of an incarnation", found=str(error.strerror)
        ) from error
    except msgspec.MsgspecError as error:
        raise LogDamaged(
            path, 0, expected="the head of an incarnation", found=str(error)
        ) from error


class LogWriter:
    """The one process that appends. Opening it takes the lock and cuts what was torn.

    After ``LogUnwritable`` from ``append`` or ``sync`` nothing is known about the newest file:
    the writer refuses all further work, and opening it again finds out.

    Raises:
        LogLocked: another process has it open.
        LogDamaged: see the module.
    """

    def __init__(self, data_dir: Path) -> None:
        self._root = data_dir / "log"
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock = _take_lock(self._root / "writer.lock")
        self._fd = -1
        self._mark_fd = -1
        self._file_index = 0
        self._file_bytes = 0
        self._failed = ""
        self.size = 0
        """Leaves in the present incarnation, durable or not."""
        self.synced_size = 0
        """Leaves in the present incarnation that survive a power cut."""
        self.torn: Torn | None = None
        """What opening cut away."""
        try:
            self._remove_unfinished()
            self.heads = incarnations(data_dir)
            if self.heads:
                self._open_incarnation()
        except BaseException:
            self.close()
            raise

    @property
    def head(self) -> LogHead | None:
        """The present incarnation; None in a new record."""
        return self.heads[-1] if self.heads else None

    @property
    def next_sequence(self) -> int:
        """The sequence that the next leaf must have."""
        head = self.head
        if head is None:
            raise LogMissing("no incarnation has been begun yet")
        return head.first_sequence + self.size

    def begin(
        self,
        *,
        incarnation: str,
        first_sequence: int,
        reason: Literal["created", "rolled_back", "replaced"],
        announced_sequence: int | None = None,
    ) -> LogHead:
        """Close the present incarnation and open the next. Durable when it returns."""
        self.sync()
        # All leaves of the old incarnation are durable. A crash here leaves it the present one;
        # whoever opens the record finds again what made us close it.
        old = self.head
        head = LogHead(
            ordinal=len(self.heads) + 1,
            incarnation=incarnation,
            first_sequence=first_sequence,
            reason=reason,
            previous_incarnation=old.incarnation if old is not None else "",
            previous_size=self.size,
            announced_sequence=announced_sequence,
        )
        folder = self._root / incarnation
        unfinished = self._root / f".{incarnation}.new"
        unfinished.mkdir()
        _write_durably(unfinished / "log.json", _encode_head(head))
        _write_durably(unfinished / "synced", _mark_text(0, 0))
        _sync_folder(unfinished)
        # The folder is whole and durable under a name that no reader looks at. A crash here
        # leaves a leftover that the next start removes.
        unfinished.rename(folder)
        _sync_folder(self._root)
        # The incarnation exists, and is the present one for every reader. A crash from here on
        # finds it without leaves, which is as good as none.
        self._close_files()
        self.heads = [*self.heads, head]
        self._open_incarnation()
        return head

    def announce(self, sequence: int) -> None:
        """Note durably where the present incarnation's ``log_opened`` stands."""
        head = self.head
        if head is None:
            raise LogMissing("no incarnation has been begun yet")
        if head.announced_sequence == sequence:
            return
        head = msgspec.structs.replace(head, announced_sequence=sequence)
        folder = self._folder
        _write_durably(folder / "log.json.new", _encode_head(head))
        # The new text is durable beside the old one, which still holds.
        (folder / "log.json.new").rename(folder / "log.json")
        _sync_folder(folder)
        self.heads = [*self.heads[:-1], head]

    def append(self, leaves: Sequence[bytes]) -> None:
        """Append encoded leaves, which follow the last one without a gap.

        They can be read when this returns, and are durable after the next ``sync``.

        Raises:
            ValueError: a leaf's sequence is not the next one; nothing was written.
            LogUnwritable: the disk refused; the writer is of no more use.
        """
        self._check_usable()
        expected = self.next_sequence
        for leaf in leaves:
            found = int.from_bytes(leaf[1:9])
            if found != expected:
                raise ValueError(f"leaf of sequence {found}, expected {expected}")
            expected += 1
        start = 0
        while start < len(leaves):
            if self.size - self._file_index == LEAVES_PER_FILE:
                self._roll()
            room = self._file_index + LEAVES_PER_FILE - self.size
            part = leaves[start : start + room]
            pieces: list[bytes] = []
            for leaf in part:
                pieces.append(len(leaf).to_bytes(_LENGTH_BYTES))
                pieces.append(leaf)
            self._write(b"".join(pieces))
            self.size += len(part)
            start += len(part)

    def append_holes(self, last_sequence: int) -> int:
        """Append a hole for every sequence up to ``last_sequence``; returns how many.

        A hole says that nothing is known of its sequence. Wide ranges are written in pieces,
        so that memory stays bounded.
        """
        count = 0
        while self.next_sequence <= last_sequence:
            first = self.next_sequence
            last = min(last_sequence, first + HOLES_PER_WRITE - 1)
            self.append(
                [encode_leaf(Leaf(sequence=at, hole=True)) for at in range(first, last + 1)]
            )
            count += last - first + 1
        return count

    def sync(self) -> bool:
        """Make durable what was appended; whether there was anything.

        May run in another thread while nothing is appended.

        Raises:
            LogUnwritable: the disk refused; the writer is of no more use.
        """
        if self.synced_size == self.size or self._fd < 0:
            return False
        self._check_usable()
        size, file_bytes = self.size, self._file_bytes
        try:
            os.fdatasync(self._fd)
            # Everything up to ``file_bytes`` is durable, and the mark does not say so yet: a
            # crash here makes the next start check more than it must.
            os.pwrite(self._mark_fd, _mark_text(self._file_index, file_bytes), 0)
            # The mark is not synced itself. If a power cut takes it back, it says less than is
            # true, never more.
        except OSError as error:
            raise self._fail("sync", error) from error
        self.synced_size = size
        return True

    def leaf(self, sequence: int) -> Leaf | None:
        """What the record says of a sequence of the present tape, before any later rollback."""
        # Without the mark a reader would stop at an event that cannot be read.
        self.sync()
        for head in reversed(self.heads):
            if sequence >= head.first_sequence:
                return self._leaf_of(head, sequence)
            if head.reason != "rolled_back":
                return None
        return None

    @property
    def tape_first_sequence(self) -> int:
        """The first sequence of the present tape that the record holds."""
        first = self.next_sequence
        for head in reversed(self.heads):
            first = min(first, head.first_sequence)
            if head.reason != "rolled_back":
                break
        return first

    def close(self) -> None:
        """Sync, and let the lock go. May be called twice."""
        try:
            if not self._failed:
                self.sync()
        finally:
            self._close_files()
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    @property
    def _folder(self) -> Path:
        return self._root / self.heads[-1].incarnation

    def _leaf_of(self, head: LogHead, sequence: int) -> Leaf | None:
        reader = IncarnationReader(self._root / head.incarnation)
        for batch in reader.batches(sequence - head.first_sequence):
            if batch.leaves[-1].sequence >= sequence:
                return batch.leaves[sequence - batch.leaves[0].sequence]
        return None

    def _check_usable(self) -> None:
        if self._failed:
            raise LogUnwritable(self._failed)

    def _fail(self, what: str, error: OSError) -> LogUnwritable:
        self._failed = (
            f"{what} of {self._folder / f'leaves-{self._file_index:012d}.bin'} at byte"
            f" {self._file_bytes}: {error.strerror}. Make room or mend the disk, and start again"
        )
        return LogUnwritable(self._failed)

    def _remove_unfinished(self) -> None:
        for folder in self._root.glob(".*.new"):
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()

    def _open_incarnation(self) -> None:
        folder = self._folder
        mark = _read_mark(folder)
        files = _list_files(folder, mark)
        self._mark_fd = os.open(folder / "synced", os.O_RDWR | os.O_CREAT, 0o644)
        self._file_index, self._file_bytes, self.size = 0, 0, 0
        if not files:
            self._fd = _create_file(folder, 0)
            self.synced_size = 0
            return
        path, index = files[-1]
        self._file_index = index
        scan = _Scan(path, first_sequence=self.heads[-1].first_sequence + index)
        for batch in scan.newest(_durable_bytes(path, index, mark)):
            self.size += len(batch.leaves)
        self.size += index
        self._file_bytes = scan.good_bytes
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        if scan.torn is not None:
            self.torn = scan.torn
            os.ftruncate(self._fd, scan.good_bytes)
        # What was there before this start may be in memory only: it counts as durable after the
        # first sync, which is made at once.
        self.synced_size = -1
        self.sync()

    def _roll(self) -> None:
        self.sync()
        # The full file is durable, and the mark says so. A crash here finds it full, and rolls.
        os.close(self._fd)
        self._fd = -1
        self._file_index = self.size
        self._file_bytes = 0
        self._fd = _create_file(self._folder, self._file_index)
        # The new file's name is durable. A crash here finds it empty and goes on with it; the
        # mark names the file before it, so nothing in the new one is taken as durable.

    def _write(self, content: bytes) -> None:
        view = memoryview(content)
        try:
            while view:
                written = os.write(self._fd, view)
                view = view[written:]
        except OSError as error:
            # A part of it may be in the file. The next start cuts it at the last whole leaf.
            raise self._fail("append", error) from error
        self._file_bytes += len(content)

    def _close_files(self) -> None:
        for descriptor in (self._fd, self._mark_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._fd = self._mark_fd = -1


class _Scan:
    """One leaf file, leaf by leaf."""

    def __init__(self, path: Path, *, first_sequence: int) -> None:
        self._path = path
        self._first_sequence = first_sequence
        self.good_bytes = 0
        self.torn: Torn | None = None

    def full(self) -> Iterator[LeafBatch]:
        """A file after which there is another: everything about it must be right."""
        yield from self._batches(durable_bytes=None, newest=False)

    def newest(self, durable_bytes: int | None) -> Iterator[LeafBatch]:
        """The newest file: beyond ``durable_bytes`` it may be torn.

        None: no mark could be read, so that only its last leaf may be torn.
        """
        yield from self._batches(durable_bytes=durable_bytes, newest=True)

    def _batches(self, *, durable_bytes: int | None, newest: bool) -> Iterator[LeafBatch]:
        count = 0
        with self._path.open("rb") as file:
            rest = b""
            while count < LEAVES_PER_FILE:
                chunk = file.read(READ_BYTES)
                if not chunk:
                    break
                buffer = rest + chunk
                leaves, used, fault = self._leaves(buffer, count, durable_bytes, newest)
                if used:
                    yield LeafBatch(leaves, buffer[:used])
                count += len(leaves)
                self.good_bytes += used
                rest = buffer[used:]
                if fault:
                    at_the_end = not file.read(1) and used + _record_bytes(rest) >= len(buffer)
                    self._stop(rest, fault, durable_bytes, newest, last_leaf=at_the_end)
                    return
            more = rest or (file.read(1) if count == LEAVES_PER_FILE else b"")
            if newest and durable_bytes is not None and self.good_bytes < durable_bytes:
                raise LogDamaged(
                    self._path,
                    self.good_bytes,
                    expected=f"{durable_bytes} bytes, which were durable",
                    found=f"{self.good_bytes + len(rest)}",
                )
            if newest and count < LEAVES_PER_FILE:
                if rest:
                    self._stop(
                        rest, "the beginning of a leaf", durable_bytes, newest, last_leaf=True
                    )
                return
            if more or count != LEAVES_PER_FILE:
                raise LogDamaged(
                    self._path,
                    self.good_bytes,
                    expected=f"{LEAVES_PER_FILE} leaves and then the end of the file",
                    found=f"{count} leaves" + (" and more" if more else ""),
                )

    def _leaves(
        self, buffer: bytes, count: int, durable_bytes: int | None, newest: bool
    ) -> tuple[list[Leaf], int, str]:
        """The whole leaves at the beginning of ``buffer``, their bytes, and what is wrong then."""
        leaves: list[Leaf] = []
        position = 0
        sequence = self._first_sequence + count
        room = LEAVES_PER_FILE - count
        while len(leaves) < room and position + _LENGTH_BYTES <= len(buffer):
            length = buffer[position] << 8 | buffer[position + 1]
            end = position + _LENGTH_BYTES + length
            if length < _LEAF_HEAD_BYTES:
                return leaves, position, f"a leaf of {length} bytes"
            if end > len(buffer):
                break
            try:
                leaf = decode_leaf(buffer[position + _LENGTH_BYTES : end])
                if (
                    newest
                    and durable_bytes is not None
                    and self.good_bytes + position >= durable_bytes
                    and not leaf.hole
                ):
                    decode_event(leaf.subject, leaf.payload)
            except (LeafRefused, EventRefused) as error:
                return leaves, position, str(error)
            if leaf.sequence != sequence:
                return leaves, position, f"sequence {leaf.sequence}, expected {sequence}"
            leaves.append(leaf)
            sequence += 1
            position = end
        return leaves, position, ""

    def _stop(
        self, rest: bytes, fault: str, durable_bytes: int | None, newest: bool, *, last_leaf: bool
    ) -> None:
        may_be_torn = newest and (
            last_leaf if durable_bytes is None else self.good_bytes >= durable_bytes
        )
        if not may_be_torn:
            raise LogDamaged(
                self._path, self.good_bytes, expected="a leaf", found=fault or f"{rest[:16].hex()}"
            )
        self.torn = Torn(
            self._path, self.good_bytes, self._path.stat().st_size - self.good_bytes, fault
        )


def _record_bytes(rest: bytes) -> int:
    return _LENGTH_BYTES + int.from_bytes(rest[:_LENGTH_BYTES])


def _durable_bytes(path: Path, index: int, mark: tuple[int, int] | None) -> int | None:
    """How much of the newest file the mark vouches for; None if there is no mark to read."""
    if mark is None:
        return None
    marked_index, marked_bytes = mark
    if marked_index == index:
        return marked_bytes
    if marked_index < index:
        return 0
    raise LogDamaged(
        path,
        0,
        expected=f"a file from leaf {marked_index} on, which was durable",
        found=f"none after leaf {index}",
    )


def _list_files(folder: Path, mark: tuple[int, int] | None) -> list[tuple[Path, int]]:
    """The leaf files with the index of their first leaf, oldest first.

    Raises:
        LogDamaged: one is missing, or there is none and the mark says that something was durable.
    """
    files = sorted(
        (path, int(match[1]))
        for path in folder.iterdir()
        if (match := _FILE_NAME.fullmatch(path.name)) is not None
    )
    for place, (path, index) in enumerate(files):
        if index != place * LEAVES_PER_FILE:
            raise LogDamaged(
                path, 0, expected=f"a file from leaf {place * LEAVES_PER_FILE} on", found=str(index)
            )
    if not files and mark is not None and mark != (0, 0):
        index, file_bytes = mark
        raise LogDamaged(
            folder / f"leaves-{index:012d}.bin",
            0,
            expected=f"{file_bytes} bytes, which were durable",
            found="no file",
        )
    return files


def _is_incarnation(folder: Path) -> bool:
    return folder.is_dir() and not folder.name.startswith(".")


def _mark_text(index: int, file_bytes: int) -> bytes:
    return b"file %012d bytes %015d\n" % (index, file_bytes)


def _read_mark(folder: Path) -> tuple[int, int] | None:
    try:
        match = _MARK_TEXT.fullmatch((folder / "synced").read_bytes())
    except FileNotFoundError:
        return None
    return None if match is None else (int(match[1]), int(match[2]))


def _take_lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise LogLocked(f"{path} is held by another process: one ledger appends to a record") from (
            error
        )
    return descriptor


def _create_file(folder: Path, index: int) -> int:
    path = folder / f"leaves-{index:012d}.bin"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
    _sync_folder(folder)
    return descriptor


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encode_head(head: LogHead) -> bytes:
    return msgspec.json.format(msgspec.json.encode(head), indent=2) + b"\n"


_HEAD_DECODER: Final = msgspec.json.Decoder(LogHead)
