"""Receipts are checked against what was submitted, and survive the process."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from waterclock_producer.errors import ReceiptsNotKept
from waterclock_producer.receipts import ReceiptBook, read_receipts, receipt_doubt
from waterclock_proto.requests import Receipt, body_commitment, body_salt

BODY = b'{"id":"r1","prompt":"hello"}'
SALT = body_salt(b"key", "acme", "r1")


def receipt(**changes) -> Receipt:
    """An admitted request's receipt; ``changes`` to the receipt, or to its event by ``event_``."""
    data = {
        "tenant": "acme",
        "id": "r1",
        "requests_sequence": 7,
        "body_commitment": body_commitment(SALT, BODY),
    }
    fields = {}
    kind = changes.pop("event_type", "waterclock.admitted.v1")
    for name, value in changes.items():
        if name.startswith("event_"):
            data[name.removeprefix("event_")] = value
        else:
            fields[name] = value
    whole = {
        "tenant": "acme",
        "id": "r1",
        "outcome": "admitted",
        "requests_sequence": 7,
        "event": json.dumps({"type": kind, "data": data}),
        "incarnation": "i",
        "sequence": 3,
        "stored_ns": 1,
        "salt": SALT.hex(),
    }
    return msgspec.convert({**whole, **fields}, Receipt)


@pytest.mark.parametrize(
    ("of", "doubt"),
    [
        pytest.param(receipt(), "", id="as it should be"),
        pytest.param(receipt(event="{"), "event: ", id="no event in it"),
        pytest.param(
            receipt(event_type="waterclock.rejected.v1"),
            "rejected.v1 found",
            id="other type",
        ),
        pytest.param(receipt(event_id="r2"), "acme/r2 found", id="another request"),
        pytest.param(receipt(event_tenant="b"), "b/r1 found", id="another tenant"),
        pytest.param(receipt(event_requests_sequence=8), "8 to 8 found", id="another submission"),
        pytest.param(receipt(salt="zz"), "salt of hex digits", id="no salt"),
        pytest.param(receipt(event_body_commitment="0" * 64), "commitment", id="another body"),
        pytest.param(
            receipt(
                outcome="rejected",
                event_type="waterclock.rejected.v1",
                event_requests_sequence=5,
                event_requests_sequence_last=9,
                salt="",
            ),
            "",
            id="folded with others",
        ),
    ],
)
def test_doubt(of: Receipt, doubt: str) -> None:
    found = receipt_doubt(of, BODY)
    assert bool(found) == bool(doubt)
    assert doubt in found


def test_without_the_body_the_commitment_cannot_be_doubted() -> None:
    assert receipt_doubt(receipt(event_body_commitment="0" * 64), None) == ""


def kept_in(book: ReceiptBook, request_id: str, raw: bytes | None = None) -> None:
    of = receipt(id=request_id)
    raw = raw or msgspec.json.encode(of)
    book.add(of, raw, body=BODY, received_us=5, doubt="")


def test_a_receipt_is_read_back_with_the_exact_body(tmp_path: Path) -> None:
    book = ReceiptBook("acme", tmp_path / "new" / "folder")
    kept_in(book, "r1")
    kept_in(book, "r2", msgspec.json.format(msgspec.json.encode(receipt(id="r2")), indent=2))
    book.close()
    assert book.path is not None
    kept, wrong = read_receipts(book.path)
    assert wrong == []
    assert [msgspec.json.decode(k.receipt, type=Receipt).id for k in kept] == ["r1", "r2"]
    assert [k.body for k in kept] == [BODY.decode()] * 2
    assert book.path.stat().st_mode & 0o077 == 0


def test_bodies_are_left_out_where_they_shall_not_be_kept(tmp_path: Path) -> None:
    book = ReceiptBook("acme", tmp_path, keep_bodies=False)
    kept_in(book, "r1")
    book.close()
    assert book.path is not None
    assert b"hello" not in book.path.read_bytes()


def test_a_line_that_a_crash_left_half_written_costs_only_itself(tmp_path: Path) -> None:
    book = ReceiptBook("acme", tmp_path)
    kept_in(book, "r1")
    book.close()
    assert book.path is not None
    with book.path.open("ab") as file:
        file.write(b'{"received_us":5,"rec')
    again = ReceiptBook("acme", tmp_path)
    kept_in(again, "r2")
    again.close()
    kept, wrong = read_receipts(book.path)
    assert [msgspec.json.decode(k.receipt, type=Receipt).id for k in kept] == ["r1", "r2"]
    assert [line.partition(":")[0] for line in wrong] == ["2"]


def test_memory_holds_the_newest(tmp_path: Path) -> None:
    book = ReceiptBook("acme", in_memory_max=2)
    for request_id in ("r1", "r2", "r1", "r3"):
        kept_in(book, request_id)
    assert [len(book.of(request_id)) for request_id in ("r1", "r2", "r3")] == [2, 0, 1]


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ReceiptsNotKept, match="file"):
        ReceiptBook("acme", tmp_path / "file")


def test_a_line_that_cannot_be_written_is_a_problem_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = ReceiptBook("acme", tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        kept_in(book, "r1")
    assert book.problem is not None
    assert "No space left" in str(book.problem)
    book.close()
