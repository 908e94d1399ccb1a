"""Snapshots: whole or not there; what cannot be used says why."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from waterclock_admission import snapshot as snapshot_module
from waterclock_admission.fold import Fold, OpenRequest
from waterclock_admission.snapshot import FILE, Owed, SnapshotRefused, Snapshots


def filled(count: int = 40) -> Fold:
    fold = Fold(ended_requests_max=160)
    fold.position = count
    fold.now_us = 1_800_000_000_000_000
    for place in range(count):
        request = OpenRequest(
            tenant="acme",
            id=f"r{place}",
            commitment=bytes(15),
            requests_sequence=place + 1,
            arrival_us=1,
            deadline_us=2,
            event_sequence=place + 1,
        )
        fold.ended.add(request, "completed", fold.now_us)
    return fold


def save(snapshots: Snapshots, fold: Fold) -> None:
    snapshots.write(
        snapshots.prepare(fold, last_payload=b"last", last_stored_ns=7, owed=(Owed(3, 1),))
    )


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    save(Snapshots(tmp_path), filled())
    restored = Snapshots(tmp_path).load(ended_requests_max=160)
    assert restored is not None
    assert restored.fold.position == 40
    assert (restored.last_payload, restored.last_stored_ns) == (b"last", 7)
    assert restored.owed == (Owed(3, 1),)
    assert len(restored.fold.ended) == 40
    assert restored.fold.ended.known("acme", "r39") is not None


def test_none_is_none(tmp_path: Path) -> None:
    assert Snapshots(tmp_path).load(ended_requests_max=10) is None


def test_a_slice_that_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    snapshots, fold = Snapshots(tmp_path), filled()
    assert len(fold.ended.slices) == 4
    save(snapshots, fold)
    again = snapshots.prepare(fold, last_payload=b"", last_stored_ns=0, owed=())
    assert again.slices == {}
    assert len(again.wanted) == 4
    fold.ended.mark_delivered("acme", "r0")
    assert len(snapshots.prepare(fold, last_payload=b"", last_stored_ns=0, owed=()).slices) == 1


def test_slices_that_nobody_names_are_removed(tmp_path: Path) -> None:
    snapshots, fold = Snapshots(tmp_path), filled()
    save(snapshots, fold)
    before = set(tmp_path.glob("slice-*"))
    fold.ended.mark_delivered("acme", "r0")
    save(snapshots, fold)
    after = set(tmp_path.glob("slice-*"))
    assert len(before) == len(after) == 4
    assert len(before & after) == 3


def test_a_process_that_starts_again_goes_on_writing_only_what_changes(tmp_path: Path) -> None:
    save(Snapshots(tmp_path), filled())
    snapshots = Snapshots(tmp_path)
    restored = snapshots.load(ended_requests_max=160)
    assert restored is not None
    prepared = snapshots.prepare(restored.fold, last_payload=b"", last_stored_ns=0, owed=())
    assert prepared.slices == {}


@pytest.mark.parametrize("name", [FILE, "slice"])
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone"])
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, damage: str) -> None:
    save(Snapshots(tmp_path), filled())
    path = tmp_path / FILE if name == FILE else next(tmp_path.glob("slice-*"))
    contents = bytearray(path.read_bytes())
    match damage:
        case "cut":
            path.write_bytes(contents[:-1])
        case "flip":
            contents[len(contents) // 2] ^= 1
            path.write_bytes(contents)
        case "empty":
            path.write_bytes(b"")
        case _:
            path.unlink()
    snapshots = Snapshots(tmp_path)
    if (name, damage) == (FILE, "gone"):
        assert snapshots.load(ended_requests_max=160) is None
        return
    with pytest.raises(SnapshotRefused):
        snapshots.load(ended_requests_max=160)


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "VERSION", 2)
    save(Snapshots(tmp_path), filled())
    monkeypatch.undo()
    with pytest.raises(SnapshotRefused, match="version 2, expected 1"):
        Snapshots(tmp_path).load(ended_requests_max=160)


def test_a_crash_at_any_file_operation_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(Exception):
        pass

    for survives in range(40):
        folder = tmp_path / str(survives)
        folder.mkdir()
        snapshots, fold = Snapshots(folder), filled()
        save(snapshots, fold)
        fold.position = 99
        fold.ended.mark_delivered("acme", "r0")
        fold.ended.mark_delivered("acme", "r20")
        left = [survives]

        def counted(work: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
            def operation(*arguments: Any, **named: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise Crash
                return work(*arguments, **named)

            return operation

        crashed = False
        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", counted(Path.replace))
            patched.setattr(Path, "unlink", counted(Path.unlink))
            patched.setattr(os, "fsync", counted(os.fsync))
            try:
                save(snapshots, fold)
            except Crash:
                crashed = True
        restored = Snapshots(folder).load(ended_requests_max=160)
        assert restored is not None
        known = restored.fold.ended.known("acme", "r0")
        assert known is not None
        assert (restored.fold.position, known.delivered) in ((40, False), (99, True))
        if not crashed:
            assert survives > 5
            return
    raise AssertionError("the write never came to its end")


def test_a_write_that_fails_is_made_good_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots, fold = Snapshots(tmp_path), filled()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            save(snapshots, fold)
    save(snapshots, fold)
    assert Snapshots(tmp_path).load(ended_requests_max=160) is not None
