"""The record on disk: what a crash at any byte leaves, who may write, what readers see."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic_tapes import SyntheticTape
from waterclock_ledger import files
from waterclock_ledger.files import (
    LogDamaged,
    LogHead,
    LogLocked,
    LogMissing,
    LogUnwritable,
    LogWriter,
    effective_ends,
    incarnations,
    open_reader,
)
from waterclock_proto.leaves import Leaf, decode_leaf, encode_leaf


def some_leaves(count: int = 9) -> list[bytes]:
    tape = SyntheticTape()
    tape.open()
    number = 0
    while len(tape.leaves) < count:
        number += 1
        tape.run(f"r{number}", number * 100)
    return tape.leaves[:count]


def begin(data_dir: Path) -> LogWriter:
    writer = LogWriter(data_dir)
    if writer.head is None:
        writer.begin(incarnation="i0", first_sequence=1, reason="created")
    return writer


def leaf_file(data_dir: Path, index: int = 0) -> Path:
    return data_dir / "log" / "i0" / f"leaves-{index:012d}.bin"


def read_back(data_dir: Path) -> list[Leaf]:
    return [
        leaf
        for head in incarnations(data_dir)
        for batch in open_reader(data_dir, head)
        for leaf in batch.leaves
    ]


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LEAVES_PER_FILE", 4)


def test_what_was_appended_is_read_back_and_hashes_as_the_files_do(tmp_path: Path) -> None:
    leaves = some_leaves()
    writer = begin(tmp_path)
    writer.append(leaves[:2])
    writer.append(leaves[2:])
    writer.close()
    assert read_back(tmp_path) == [decode_leaf(leaf) for leaf in leaves]
    framed = b"".join(
        batch.framed for head in incarnations(tmp_path) for batch in open_reader(tmp_path, head)
    )
    assert framed == leaf_file(tmp_path).read_bytes()
    assert framed == b"".join(len(leaf).to_bytes(2) + leaf for leaf in leaves)


@given(cuts=st.lists(st.integers(0, 30), max_size=6))
def test_how_leaves_are_divided_among_appends_does_not_show(
    cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    leaves = some_leaves(30)
    data_dir = tmp_path_factory.mktemp("record")
    writer = begin(data_dir)
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), 30], strict=True):
        writer.append(leaves[start:end])
    writer.close()
    content = leaf_file(data_dir).read_bytes()
    assert (
        hashlib.sha256(content).digest()
        == hashlib.sha256(b"".join(len(leaf).to_bytes(2) + leaf for leaf in leaves)).digest()
    )


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 9])
def test_files_are_full_before_the_next_one_begins(tmp_path: Path, count: int) -> None:
    leaves = some_leaves()[:count]
    writer = begin(tmp_path)
    writer.append(leaves)
    writer.close()
    again = LogWriter(tmp_path)
    assert (again.size, again.torn, again.next_sequence) == (count, None, count + 1)
    again.append(some_leaves()[count:])
    again.close()
    assert [leaf.sequence for leaf in read_back(tmp_path)] == list(range(1, 10))
    names = sorted(path.name for path in (tmp_path / "log" / "i0").glob("leaves-*"))
    assert names == [f"leaves-{index:012d}.bin" for index in (0, 4, 8)]


@pytest.mark.usefixtures("small_files")
def test_a_crash_at_every_byte_of_an_append_leaves_a_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two thousand starts: none of them needs a disk that really keeps it.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    leaves = some_leaves()
    mark = tmp_path / "log" / "i0" / "synced"
    writer = begin(tmp_path)
    writer.append(leaves[:5])
    writer.sync()
    durable_bytes = leaf_file(tmp_path, 4).stat().st_size
    marked = mark.read_bytes()
    writer.append(leaves[5:8])
    writer.close()
    content = leaf_file(tmp_path, 4).read_bytes()
    ends = [0]
    for leaf in leaves[4:8]:
        ends.append(ends[-1] + 2 + len(leaf))
    assert ends[1] == durable_bytes
    for size in range(durable_bytes, len(content) + 1):
        leaf_file(tmp_path, 4).write_bytes(content[:size])
        leaf_file(tmp_path, 8).unlink(missing_ok=True)
        mark.write_bytes(marked)
        kept = 4 + sum(end <= size for end in ends[1:])
        assert len(read_back(tmp_path)) == kept, "a reader sees the prefix before anybody repairs"
        again = LogWriter(tmp_path)
        assert again.size == kept
        assert (again.torn is not None) == (size not in ends)
        again.append(leaves[kept:])
        again.close()
        assert [encode_leaf(leaf) for leaf in read_back(tmp_path)] == leaves


def test_a_file_shorter_than_what_was_durable_is_damage(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    writer.append(some_leaves())
    writer.close()
    size = leaf_file(tmp_path).stat().st_size
    os.truncate(leaf_file(tmp_path), size - 1)
    with pytest.raises(LogDamaged, match="which were durable"):
        LogWriter(tmp_path)
    with pytest.raises(LogDamaged, match="which were durable"):
        read_back(tmp_path)


def zeros_behind(content: bytes, ends: list[int]) -> bytes:
    return content + bytes(5000)


def last_leaf_half_written(content: bytes, ends: list[int]) -> bytes:
    return content[: ends[-1] - 60] + bytes(60)


def middle_leaf_half_written(content: bytes, ends: list[int]) -> bytes:
    return content[: ends[6] - 60] + bytes(60) + content[ends[6] :]


def a_later_leaf_twice(content: bytes, ends: list[int]) -> bytes:
    return content[: ends[6]] + content[ends[5] :]


@pytest.mark.parametrize(
    ("spoil", "kept"),
    [
        pytest.param(zeros_behind, 9, id="the length before the contents"),
        pytest.param(last_leaf_half_written, 8, id="the last leaf half in zeros"),
        pytest.param(middle_leaf_half_written, 5, id="a page in the middle never written"),
        pytest.param(a_later_leaf_twice, 6, id="a sequence twice"),
    ],
)
def test_beyond_the_mark_a_power_cut_may_have_spoilt_anything(
    tmp_path: Path, spoil: Callable[[bytes, list[int]], bytes], kept: int
) -> None:
    leaves = some_leaves()
    writer = begin(tmp_path)
    writer.append(leaves[:5])
    writer.sync()
    mark = (tmp_path / "log" / "i0" / "synced").read_bytes()
    writer.append(leaves[5:])
    writer.close()
    (tmp_path / "log" / "i0" / "synced").write_bytes(mark)
    ends = [0]
    for leaf in leaves:
        ends.append(ends[-1] + 2 + len(leaf))
    path = leaf_file(tmp_path)
    path.write_bytes(spoil(path.read_bytes(), ends))
    assert len(read_back(tmp_path)) == kept
    again = LogWriter(tmp_path)
    assert again.size == kept
    assert again.torn is not None
    assert again.torn.offset == ends[kept]
    again.append(leaves[kept:])
    again.close()
    assert [encode_leaf(leaf) for leaf in read_back(tmp_path)] == leaves


@pytest.mark.parametrize(
    ("place", "found"),
    [
        pytest.param(0, "bytes", id="length"),
        pytest.param(2, "kind", id="kind"),
        pytest.param(10, "sequence", id="sequence"),
        pytest.param(19, "subject of", id="length of the subject"),
    ],
)
def test_a_fault_in_the_middle_names_file_offset_expected_and_found(
    tmp_path: Path, place: int, found: str
) -> None:
    leaves = some_leaves()
    writer = begin(tmp_path)
    writer.append(leaves)
    writer.close()
    offset = sum(2 + len(leaf) for leaf in leaves[:4])
    content = bytearray(leaf_file(tmp_path).read_bytes())
    content[offset + place] ^= 0x7F
    leaf_file(tmp_path).write_bytes(content)
    for open_it in (LogWriter, read_back):
        with pytest.raises(LogDamaged) as raised:
            open_it(tmp_path)
        if found != "bytes":
            # A wrong length is only seen at what then passes for the next leaf, or for the end.
            assert raised.value.offset == offset
        assert "leaves-000000000000.bin" in str(raised.value)
        assert "expected" in str(raised.value)
        assert found in str(raised.value)


@pytest.mark.parametrize("spoilt", ["", "file 1 bytes 2", None])
def test_without_a_mark_only_the_last_leaf_may_be_torn(tmp_path: Path, spoilt: str | None) -> None:
    leaves = some_leaves()
    for name, change in (("torn", -3), ("damaged", None)):
        data_dir = tmp_path / name
        writer = begin(data_dir)
        writer.append(leaves)
        writer.close()
        mark = data_dir / "log" / "i0" / "synced"
        if spoilt is None:
            mark.unlink()
        else:
            mark.write_text(spoilt)
        content = bytearray(leaf_file(data_dir).read_bytes())
        if change is None:
            content[2 + len(leaves[0]) + 2] = 9
        else:
            del content[change:]
        leaf_file(data_dir).write_bytes(content)
    again = LogWriter(tmp_path / "torn")
    assert again.size == 8
    again.close()
    with pytest.raises(LogDamaged, match="kind"):
        LogWriter(tmp_path / "damaged")


@pytest.mark.usefixtures("small_files")
def test_a_file_that_is_missing_in_between_is_damage(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    writer.append(some_leaves())
    writer.close()
    leaf_file(tmp_path, 4).unlink()
    with pytest.raises(LogDamaged, match="a file from leaf 4 on"):
        read_back(tmp_path)


@pytest.mark.usefixtures("small_files")
def test_a_newest_file_that_is_missing_is_damage(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    writer.append(some_leaves())
    writer.close()
    leaf_file(tmp_path, 8).unlink()
    with pytest.raises(LogDamaged, match="from leaf 8 on, which was durable"):
        LogWriter(tmp_path)


@pytest.mark.parametrize("opened", [read_back, LogWriter], ids=["by a reader", "by the writer"])
def test_files_that_are_all_missing_are_damage(
    tmp_path: Path, opened: Callable[[Path], object]
) -> None:
    writer = begin(tmp_path)
    writer.append(some_leaves())
    writer.close()
    durable_bytes = leaf_file(tmp_path).stat().st_size
    leaf_file(tmp_path).unlink()
    with pytest.raises(LogDamaged, match=f"{durable_bytes} bytes, which were durable, found no"):
        opened(tmp_path)


@pytest.mark.usefixtures("small_files")
def test_an_older_file_that_is_shorter_or_longer_is_damage(tmp_path: Path) -> None:
    leaves = some_leaves()
    writer = begin(tmp_path)
    writer.append(leaves)
    writer.close()
    content = leaf_file(tmp_path, 0).read_bytes()
    for wrong in (content[: -len(leaves[3]) - 2], content[:-1], content + b"\0"):
        leaf_file(tmp_path, 0).write_bytes(wrong)
        with pytest.raises(LogDamaged, match="4 leaves and then the end"):
            read_back(tmp_path)


def test_two_writers_are_refused(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    with pytest.raises(LogLocked, match="one ledger appends"):
        LogWriter(tmp_path)
    writer.close()
    LogWriter(tmp_path).close()


def test_a_leaf_out_of_order_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    leaves = some_leaves()
    writer = begin(tmp_path)
    with pytest.raises(ValueError, match="leaf of sequence 3, expected 2"):
        writer.append([leaves[0], leaves[2]])
    assert writer.size == 0
    writer.append(leaves)
    writer.close()
    assert len(read_back(tmp_path)) == 9


@pytest.mark.usefixtures("small_files")
def test_readers_see_a_prefix_while_the_writer_runs(tmp_path: Path) -> None:
    leaves = some_leaves()
    writer = begin(tmp_path)
    opened_early = open_reader(tmp_path, incarnations(tmp_path)[0])
    for count, leaf in enumerate(leaves, start=1):
        writer.append([leaf])
        first, second = read_back(tmp_path), read_back(tmp_path)
        assert first == second
        assert [encode_leaf(found) for found in first] == leaves[:count]
    # This one knew only the first file, and reads it to its end.
    assert [leaf.sequence for batch in opened_early for leaf in batch.leaves] == [1, 2, 3, 4]
    assert opened_early.torn is None
    writer.close()


def test_a_reader_in_the_middle_of_an_append_sees_the_leaves_that_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = some_leaves()
    writer = begin(tmp_path)
    writer.append(leaves[:3])
    real_write = os.write
    seen: list[int] = []

    def write_a_little(descriptor: int, content: memoryview) -> int:
        written = real_write(descriptor, content[:97])
        seen.append(len(read_back(tmp_path)))
        return written

    monkeypatch.setattr(os, "write", write_a_little)
    writer.append(leaves[3:])
    assert seen == sorted(seen)
    assert set(seen) == set(range(3, 10))
    writer.close()


@pytest.mark.parametrize("written", [0, 700, None], ids=["nothing", "a part", "everything"])
def test_after_a_failed_write_the_writer_is_of_no_use_and_the_next_one_finds_a_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int | None
) -> None:
    leaves = some_leaves()
    writer = begin(tmp_path)
    writer.append(leaves[:3])
    writer.sync()
    real_write = os.write

    def fail(descriptor: int, content: memoryview) -> int:
        real_write(descriptor, content[:written])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(LogUnwritable, match="No space left"):
        writer.append(leaves[3:])
    monkeypatch.undo()
    with pytest.raises(LogUnwritable, match="No space left"):
        writer.append(leaves[3:])
    writer.close()
    again = LogWriter(tmp_path)
    assert 3 <= again.size <= 9
    assert again.size == (9 if written is None else again.size)
    again.append(leaves[again.size :])
    again.close()
    assert [encode_leaf(leaf) for leaf in read_back(tmp_path)] == leaves


def test_after_a_failed_sync_the_mark_has_not_moved_and_the_writer_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = some_leaves()
    writer = begin(tmp_path)
    writer.append(leaves[:3])
    writer.sync()
    mark = (tmp_path / "log" / "i0" / "synced").read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    writer.append(leaves[3:])
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(LogUnwritable, match="Input/output"):
        writer.sync()
    monkeypatch.undo()
    assert writer.synced_size == 3
    assert (tmp_path / "log" / "i0" / "synced").read_bytes() == mark
    with pytest.raises(LogUnwritable, match="Input/output"):
        writer.sync()
    writer.close()


def test_syncing_makes_durable_before_the_mark_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real_sync, real_pwrite = os.fdatasync, os.pwrite

    def sync(descriptor: int) -> None:
        order.append("data")
        real_sync(descriptor)

    def pwrite(descriptor: int, content: bytes, offset: int) -> int:
        order.append("mark")
        return real_pwrite(descriptor, content, offset)

    writer = begin(tmp_path)
    writer.append(some_leaves())
    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert writer.sync()
    assert not writer.sync()
    assert order == ["data", "mark"]
    assert writer.synced_size == 9
    writer.close()


class Crash(Exception):
    """The machine stops here."""


def test_a_crash_at_every_step_of_beginning_leaves_the_old_or_the_new_incarnation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = some_leaves()
    found: set[str] = set()
    for step in range(20):
        data_dir = tmp_path / str(step)
        writer = begin(data_dir)
        writer.append(leaves)
        left = step

        def count_down(name: str) -> Callable[..., object]:
            real = getattr(os, name)

            def call(*arguments: object, **named: object) -> object:
                nonlocal left
                if left == 0:
                    raise Crash
                left -= 1
                return real(*arguments, **named)

            return call

        with monkeypatch.context() as patch:
            for name in ("fdatasync", "pwrite", "mkdir", "fsync", "rename"):
                patch.setattr(os, name, count_down(name))
            try:
                writer.begin(incarnation="i1", first_sequence=8, reason="rolled_back")
                finished = True
            except Crash:
                finished = False
                # What a killed process leaves behind: its lock goes, nothing else happens.
                os.close(writer._lock)
                writer._lock = -1
        if finished:
            writer.close()
        again = LogWriter(data_dir)
        assert again.head is not None
        found.add(again.head.incarnation)
        assert (again.head.incarnation, again.next_sequence) in {("i0", 10), ("i1", 8)}
        assert not list((data_dir / "log").glob(".*.new"))
        again.close()
        assert len(read_back(data_dir)) == 9
        if finished:
            break
    else:
        pytest.fail("beginning an incarnation takes more steps than the test knows")
    assert step > 5
    assert found == {"i0", "i1"}


def test_announcing_is_kept(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    writer.announce(17)
    writer.close()
    (head,) = incarnations(tmp_path)
    assert head.announced_sequence == 17


def test_holes_fill_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "HOLES_PER_WRITE", 3)
    writer = begin(tmp_path)
    writer.append(some_leaves()[:2])
    assert writer.append_holes(9) == 7
    assert writer.append_holes(9) == 0
    writer.close()
    found = read_back(tmp_path)
    assert [leaf.sequence for leaf in found] == list(range(1, 10))
    assert [leaf.hole for leaf in found] == [False, False, *[True] * 7]


@pytest.mark.usefixtures("small_files")
def test_a_leaf_is_found_by_its_sequence_on_the_present_tape(tmp_path: Path) -> None:
    leaves = some_leaves()
    writer = begin(tmp_path)
    writer.append(leaves)
    writer.begin(incarnation="i1", first_sequence=7, reason="rolled_back")
    writer.append([encode_leaf(Leaf(sequence=7, subject="wc.event.x._._", payload=b"other"))])
    assert writer.tape_first_sequence == 1
    found = [writer.leaf(sequence) for sequence in range(1, 10)]
    assert [leaf.payload if leaf else None for leaf in found] == [
        *(decode_leaf(leaf).payload for leaf in leaves[:6]),
        b"other",
        None,
        None,
    ]
    writer.begin(incarnation="i2", first_sequence=1, reason="replaced")
    assert writer.tape_first_sequence == 1
    assert writer.leaf(3) is None
    writer.close()


def head(ordinal: int, first: int, reason: str) -> LogHead:
    return LogHead(
        ordinal=ordinal,
        incarnation=f"i{ordinal}",
        first_sequence=first,
        reason=reason,  # pyright: ignore[reportArgumentType] - a literal in every case below
    )


@pytest.mark.parametrize(
    ("heads", "ends"),
    [
        ([], []),
        ([(1, "created")], [None]),
        ([(1, "created"), (8, "rolled_back")], [8, None]),
        ([(1, "created"), (8, "rolled_back"), (12, "rolled_back")], [8, 12, None]),
        ([(1, "created"), (8, "rolled_back"), (5, "rolled_back")], [5, 5, None]),
        ([(1, "created"), (1, "replaced")], [None, None]),
        (
            [(1, "created"), (9, "rolled_back"), (1, "replaced"), (4, "rolled_back")],
            [9, None, 4, None],
        ),
    ],
)
def test_where_a_rollback_takes_effect(
    heads: list[tuple[int, str]], ends: list[int | None]
) -> None:
    made = [head(place, first, reason) for place, (first, reason) in enumerate(heads, start=1)]
    assert effective_ends(made) == ends


def test_incarnations_that_do_not_follow_one_another_are_damage(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    writer.begin(incarnation="i1", first_sequence=1, reason="replaced")
    writer.close()
    shutil.rmtree(tmp_path / "log" / "i0")
    with pytest.raises(LogDamaged, match="incarnation 1 after ''"):
        incarnations(tmp_path)


def test_a_record_that_was_not_begun_has_no_next_sequence(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    with pytest.raises(LogMissing):
        _ = writer.next_sequence
    writer.close()
    assert incarnations(tmp_path) == []
