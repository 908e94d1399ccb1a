"""Snapshots of the fold."""

import hashlib
from pathlib import Path

import msgspec
import pytest

from waterclock_scheduler import snapshot
from waterclock_scheduler.snapshot import Snapshot, Unusable, freeze, read, thaw, why_not, write

from .tape_model import Model, fold

PAYLOAD = b"what stands at its position"


def busy_model() -> Model:
    model = Model()
    worker = model.start_worker(slots=2)
    for number in range(6):
        model.admit(f"r{number}", tenant="acme" if number % 2 else "globex")
    model.cancel("not-yet-here")
    model.turn()
    model.finish(worker)
    model.turn()
    return model


def test_what_was_written_is_what_is_read(tmp_path: Path) -> None:
    model = busy_model()
    path = tmp_path / "scheduler.snapshot"
    write(path, freeze(model.state, PAYLOAD))
    found = read(path)
    assert isinstance(found, Snapshot)
    assert found.state == model.state == fold(model)
    assert found.sha256 == hashlib.sha256(PAYLOAD).hexdigest()
    assert [file.name for file in tmp_path.iterdir()] == ["scheduler.snapshot"]


def test_a_write_that_was_cut_off_leaves_the_old_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.snapshot"
    whole = freeze(busy_model().state, PAYLOAD)
    write(path, whole)
    (tmp_path / "scheduler.snapshot.new").write_bytes(whole[:100])
    assert isinstance(read(path), Snapshot)
    write(path, whole)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda whole: b"", id="empty"),
        pytest.param(lambda whole: whole[:-1], id="cut off"),
        pytest.param(lambda whole: b"\x00" * len(whole), id="zeros"),
        pytest.param(lambda whole: whole + b"x", id="something behind it"),
        pytest.param(lambda whole: msgspec.msgpack.encode({"version": 1}), id="another shape"),
        pytest.param(
            lambda whole: msgspec.msgpack.encode(
                msgspec.msgpack.decode(whole, strict=False) | {"version": snapshot.VERSION + 1}
            ),
            id="another version",
        ),
    ],
)
def test_a_damaged_snapshot_is_unusable_and_says_why(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "scheduler.snapshot"
    small = freeze(Model().state, PAYLOAD)
    path.write_bytes(damage(small))  # pyright: ignore[reportCallIssue]  # a lambda of the table
    found = read(path)
    assert isinstance(found, Unusable)
    assert found.reason
    assert not found.missing


def test_a_missing_snapshot_is_nothing_to_worry_about(tmp_path: Path) -> None:
    found = read(tmp_path / "none")
    assert isinstance(found, Unusable)
    assert found.missing


@pytest.mark.parametrize(
    ("first", "last", "payload", "fits"),
    [
        pytest.param(1, 9, PAYLOAD, True, id="the tape goes on"),
        pytest.param(5, 5, PAYLOAD, True, id="the tape ends there"),
        pytest.param(1, 4, None, False, id="newer than the tape"),
        pytest.param(1, 0, None, False, id="an empty tape"),
        pytest.param(1, 9, b"other", False, id="another tape"),
        pytest.param(6, 9, None, True, id="what it ends at has just aged out"),
        pytest.param(7, 9, None, False, id="events after it have aged out"),
    ],
)
def test_whether_it_fits_the_tape(first: int, last: int, payload: bytes | None, fits: bool) -> None:
    model = Model()
    model.state.position = 5
    found = thaw(freeze(model.state, PAYLOAD))
    assert isinstance(found, Snapshot)
    assert (why_not(found, first=first, last=last, payload=payload) is None) is fits
