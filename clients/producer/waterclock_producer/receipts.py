"""Receipts: the producer's evidence. Checked when they come, and kept.

A folder holds one file a tenant, ``<tenant>.receipts.jsonl``: a line for each receipt, appended
and never changed, each written by one call before anybody is told about the receipt. A crash of
this process loses none of them; a power cut may lose what the kernel had not yet put on disk.

A line is a ``KeptReceipt`` as JSON. Its ``body`` is the exact submission, prompt included: with
the salt it proves what was submitted, and without it the receipt proves only that something was.
So the file is readable by its owner alone.
"""

import contextlib
import os
from collections import OrderedDict
from pathlib import Path

import msgspec
from msgspec import Struct

from waterclock_producer.errors import ReceiptsNotKept
from waterclock_producer.limits import RECEIPTS_IN_MEMORY_MAX
from waterclock_proto.envelope import TYPE_PREFIX, TYPE_SUFFIX
from waterclock_proto.names import Sequence, UnixUs
from waterclock_proto.requests import Receipt, body_commitment


class KeptReceipt(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a receipts file."""

    received_us: UnixUs
    receipt: msgspec.Raw
    """Exactly what came; decodes as ``Receipt``."""
    body: str | None = None
    """The exact bytes that were submitted (UTF-8), where they are known and shall be kept."""
    doubt: str = ""
    """What in the receipt contradicts the submission; empty if nothing does."""


class _About(Struct, frozen=True):
    tenant: str
    requests_sequence: Sequence
    id: str = ""
    requests_sequence_last: Sequence | None = None
    body_commitment: str = ""


class _Event(Struct, frozen=True):
    type: str
    data: _About


_EVENT_DECODER = msgspec.json.Decoder(_Event)
_ENCODER = msgspec.json.Encoder()
_LINE_DECODER = msgspec.json.Decoder(KeptReceipt)


def receipt_doubt(receipt: Receipt, body: bytes | None) -> str:
    """What the receipt gets wrong about itself or about ``body``; empty if nothing.

    Compares the event inside with the receipt around it, and the commitment with
    HMAC-SHA-256(salt, body). Whether the event stands on the tape is for an auditor to say.
    """
    try:
        event = _EVENT_DECODER.decode(receipt.event)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        return f"event: {error}"
    about = event.data
    expected = f"{TYPE_PREFIX}{receipt.outcome}{TYPE_SUFFIX}"
    if event.type != expected:
        return f"event of type {expected} expected, {event.type} found"
    if (about.tenant, about.id) != (receipt.tenant, receipt.id):
        return (
            f"event about {receipt.tenant}/{receipt.id} expected, {about.tenant}/{about.id} found"
        )
    last = about.requests_sequence_last or about.requests_sequence
    if not about.requests_sequence <= receipt.requests_sequence <= last:
        return (
            f"event about submission {receipt.requests_sequence} expected, "
            f"{about.requests_sequence} to {last} found"
        )
    if receipt.outcome != "admitted" or body is None:
        return ""
    try:
        salt = bytes.fromhex(receipt.salt)
    except ValueError:
        return f"salt of hex digits expected, {len(receipt.salt)} other characters found"
    committed = body_commitment(salt, body)
    if committed != about.body_commitment:
        return (
            f"commitment {committed} expected for the submitted body, {about.body_commitment} found"
        )
    return ""


class ReceiptBook:
    """Newest receipts in memory, all of them in a folder if one is given.

    Owned by one event loop. ``problem`` is set once a line could not be written, and stays.
    """

    def __init__(
        self,
        tenant: str,
        folder: Path | None = None,
        *,
        keep_bodies: bool = True,
        in_memory_max: int = RECEIPTS_IN_MEMORY_MAX,
    ) -> None:
        """Opens the file for appending and closes a line that a crash left half written.

        Raises:
            ReceiptsNotKept: the folder or its file cannot be written.
        """
        self.problem: ReceiptsNotKept | None = None
        self._keep_bodies = keep_bodies
        self._in_memory_max = in_memory_max
        self._by_id: OrderedDict[str, tuple[Receipt, ...]] = OrderedDict()
        self._file: int | None = None
        self.path = None if folder is None else folder / f"{tenant}.receipts.jsonl"
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")
        except OSError as error:
            self.close()
            raise ReceiptsNotKept(f"receipts in {self.path}: {error}") from error

    def add(
        self, receipt: Receipt, raw: bytes, *, body: bytes | None, received_us: int, doubt: str
    ) -> None:
        """Keep a receipt. Its line is written when this returns, or ``problem`` is set."""
        earlier = self._by_id.pop(receipt.id, ())
        self._by_id[receipt.id] = (*earlier, receipt)
        while len(self._by_id) > self._in_memory_max:
            self._by_id.popitem(last=False)
        if self._file is None:
            return
        kept = KeptReceipt(
            received_us=received_us,
            receipt=msgspec.Raw(msgspec.json.format(raw, indent=-1) if b"\n" in raw else raw),
            body=body.decode() if body is not None and self._keep_bodies else None,
            doubt=doubt,
        )
        rest = memoryview(_ENCODER.encode(kept) + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self.problem = ReceiptsNotKept(f"receipts in {self.path}: {error}")

    def of(self, request_id: str) -> tuple[Receipt, ...]:
        """The receipts of one request, as far as memory has them, in the order of coming."""
        return self._by_id.get(request_id, ())

    def close(self) -> None:
        """Bring everything to the disk and close the file. May be repeated."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._file)
            os.close(self._file)
            self._file = None


def read_receipts(path: Path) -> tuple[list[KeptReceipt], list[str]]:
    """All whole lines of a receipts file, and ``line: what is wrong`` for the others.

    A crash can leave a half written line; what was appended after it is read all the same.
    """
    kept: list[KeptReceipt] = []
    wrong: list[str] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if line:
            try:
                kept.append(_LINE_DECODER.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                wrong.append(f"{number}: {error}")
    return kept, wrong
