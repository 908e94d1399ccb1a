"""Reports: golden bytes, percentiles, filters, and one request drawn."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic_tapes import START_US, SyntheticTape, dispatched, queued_end, stamp
from waterclock_ledger.check import check_log
from waterclock_ledger.files import LogMissing, LogWriter
from waterclock_ledger.fold import Tape
from waterclock_ledger.record import read_record
from waterclock_ledger.report import (
    MEASURES,
    columns,
    milliseconds,
    nearest_rank,
    replay,
    spread,
    table,
)
from waterclock_ledger.timeline import LETTERS, bar, find_timelines, request_text, utc
from waterclock_proto.segments import SEGMENTS

GOLDEN = Path(__file__).parent / "golden"


def small_mesh() -> SyntheticTape:
    """Two tenants, three tiers, every outcome, and something of everything that can go wrong."""
    tape = SyntheticTape()
    tape.open()
    for number in range(1, 11):
        tape.run(
            f"req-{number}",
            number * 3_000,
            queue_us=number * number * 1_000,
            exec_us=50_000 + number * 7_001,
        )
    tape.run("vip-1", 40_000, tier="platinum", queue_us=100, exec_us=30_123)
    tape.run("late", 45_000, outcome="queued_expired", queue_us=10_000_000)
    tape.run("gone", 46_000, outcome="queued_cancelled", queue_us=1_500_000)
    tape.run("stopped", 47_000, outcome="cancelled", exec_us=12_000)
    tape.run("broken", 48_000, outcome="failed", exec_us=777)
    tape.run("shed", 49_000, outcome="rejected", queue_us=20)
    tape.run("still-open", 50_000, outcome="open")
    tape.run("twice", 51_000, lost_attempts=1)
    tape.refuse("acme", 52_000)
    tape.refuse("globex", 53_000, count=17, reason="malformed")
    tape.run("req-1", 54_000, tenant="globex", tier="标准", exec_us=15_000)
    tape.submit_again("req-1", 55_000)
    tape.hole()
    skewed = tape.admitted(
        "skewed",
        60_000,
        received=stamp(59_100, "admission", boot="fedcba9876543210"),
        decided=stamp(59_300, "admission", boot="fedcba9876543210"),
    )
    tape.emit(tape.chain("admission"), skewed)
    tape.emit(tape.chain("scheduler"), queued_end(skewed, "queued_expired", 70_000))
    tape.store("wc.event.unheard_of._._", b"{}")
    tape.seal(tape.chain("worker", "worker-w1-aaaaaa"))
    return tape


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ledger")
    small_mesh().write(folder)
    return folder


@pytest.mark.parametrize("repetition", [1, 2])
def test_a_report_is_these_bytes(data_dir: Path, repetition: int) -> None:
    assert replay(data_dir).to_text() == (GOLDEN / "queue.txt").read_text(encoding="utf-8")
    assert replay(data_dir, clock="exec").to_text() == (GOLDEN / "exec.txt").read_text(
        encoding="utf-8"
    )
    assert replay(data_dir).to_json() == (GOLDEN / "report.json").read_bytes()


def test_a_request_is_drawn_like_this(data_dir: Path) -> None:
    text = request_text(data_dir, "acme", "twice", width=72)
    assert text == (GOLDEN / "request.txt").read_text(encoding="utf-8")


def test_one_request_alone_is_folded_as_it_is_among_all(data_dir: Path) -> None:
    (tape,) = read_record(data_dir).tapes
    summaries = list(tape.summaries())
    assert len(summaries) == 20
    for summary in summaries:
        (found,) = find_timelines(data_dir, summary.tenant, summary.id)
        alone = Tape(settle_after=None)
        alone.lives = {summary.tenant: {summary.id: found.life}}
        assert list(alone.summaries()) == [summary]


def test_one_request_alone_knows_who_was_deposed_meanwhile(tmp_path: Path) -> None:
    tape = SyntheticTape()
    tape.open()
    admitted = tape.admitted("r", 1_000)
    tape.emit(tape.chain("admission"), admitted)
    # Nothing tells of the second scheduler but what it does with another request.
    other = tape.admitted("other", 2_000)
    tape.emit(tape.chain("admission"), other)
    tape.emit(tape.chain("scheduler", "scheduler-0002", 2), dispatched(other, 1, 3_000))
    tape.emit(tape.chain("scheduler"), queued_end(admitted, "queued_expired", 4_000))
    tape.write(tmp_path)
    (found,) = find_timelines(tmp_path, "acme", "r")
    assert found.life.outcome == "open"
    assert [data.TYPE for _, data in found.events] == ["admitted", "expired"]
    assert "acme/r  gold  sim-8b  open" in request_text(tmp_path, "acme", "r")


def test_a_request_on_two_tapes_has_a_page_of_each(tmp_path: Path) -> None:
    tape = SyntheticTape()
    tape.open("first")
    tape.run("r", 1_000)
    tape.write(tmp_path, "first")
    writer = LogWriter(tmp_path)
    writer.begin(incarnation="second", first_sequence=4, reason="rolled_back")
    again = SyntheticTape(first_sequence=4)
    again.chains = tape.chains
    again.run("r", 1_000, outcome="queued_expired")
    writer.append(again.leaves)
    writer.begin(incarnation="third", first_sequence=1, reason="replaced")
    writer.append(tape.leaves)
    writer.close()
    first, third = find_timelines(tmp_path, "acme", "r")
    assert (first.life.outcome, first.abandoned) == ("expired", 6)
    assert (third.life.outcome, third.abandoned) == ("completed", 0)
    text = request_text(tmp_path, "acme", "r")
    assert "On the tape that began with incarnation first" in text
    assert "On the tape that began with incarnation third" in text
    assert "6 events about it were taken off the tape by a rollback" in text
    assert replay(tmp_path).to_text().count("incarnation ") == 3


def test_nothing_is_written_and_nothing_must_run(data_dir: Path) -> None:
    writer = LogWriter(data_dir)
    before = {path: path.read_bytes() for path in data_dir.rglob("*") if path.is_file()}
    folder = data_dir / "log" / "i0"
    for path in (data_dir, data_dir / "log", folder):
        path.chmod(0o555)
    try:
        replay(data_dir)
        check_log(data_dir)
        request_text(data_dir, "acme", "req-1")
    finally:
        for path in (data_dir, data_dir / "log", folder):
            path.chmod(0o755)
    assert {path: path.read_bytes() for path in data_dir.rglob("*") if path.is_file()} == before
    writer.close()


def test_a_tenant_and_a_moment_choose_what_is_shown_and_not_what_is_counted(
    data_dir: Path,
) -> None:
    whole = replay(data_dir)
    globex = replay(data_dir, tenant="globex")
    assert {group.tenant for group in globex.groups} == {"globex"}
    assert globex.groups == [group for group in whole.groups if group.tenant == "globex"]
    assert globex.totals == whole.totals
    later = replay(data_dir, since_us=START_US + 49_000)
    assert later.totals == whole.totals
    outcomes = {(group.tenant, group.tier): group.outcomes for group in later.groups}
    assert outcomes[("acme", "gold")]["completed"] == 1
    assert outcomes[("acme", "gold")]["rejected"] == 2
    assert ("acme", "platinum") not in outcomes
    assert replay(data_dir, tenant="nobody").groups == []
    assert "no submissions" in replay(data_dir, tenant="nobody").to_text()


def test_every_submission_has_one_outcome(data_dir: Path) -> None:
    groups = replay(data_dir).groups
    assert sum(group.submissions for group in groups) == 11 + 7 + 1 + 1 + 17 + 1
    for group in groups:
        assert group.submissions == sum(group.outcomes.values())
        ended = sum(spreads["queue_clock"].n for spreads in group.by_outcome.values())
        assert ended == group.ended["queue_clock"].n if group.ended else ended == 0


def test_a_record_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogMissing, match="expected the folder of at least one incarnation"):
        replay(tmp_path)
    with pytest.raises(LogMissing, match="expected a record"):
        request_text(tmp_path, "acme", "r")


@pytest.mark.parametrize(
    ("values", "p50", "p90", "p99", "maximum"),
    [
        pytest.param([7], 7, 7, 7, 7, id="one"),
        pytest.param([1, 2], 1, 2, 2, 2, id="two"),
        pytest.param([3, 1, 2], 2, 3, 3, 3, id="three, unsorted"),
        pytest.param(list(range(1, 11)), 5, 9, 10, 10, id="ten"),
        pytest.param(list(range(1, 101)), 50, 90, 99, 100, id="a hundred"),
        pytest.param(list(range(1, 102)), 51, 91, 100, 101, id="a hundred and one"),
        pytest.param(list(range(1, 1001)), 500, 900, 990, 1000, id="a thousand"),
        pytest.param([-5, 0, 5], 0, 5, 5, 5, id="a negative one"),
        pytest.param([4, 4, 4, 4], 4, 4, 4, 4, id="all the same"),
    ],
)
def test_percentiles_are_nearest_rank(
    values: list[int], p50: int, p90: int, p99: int, maximum: int
) -> None:
    found = spread(values)
    assert (found.n, found.p50_us, found.p90_us, found.p99_us, found.max_us) == (
        len(values),
        p50,
        p90,
        p99,
        maximum,
    )


@given(st.lists(st.integers(), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_enough_values_do_not_exceed(
    values: list[int], percent: int
) -> None:
    found = nearest_rank(sorted(values), percent)
    assert found in values
    assert 100 * sum(value <= found for value in values) >= percent * len(values)
    assert 100 * sum(value < found for value in values) < percent * len(values)


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0, "0.000"),
        (1, "0.001"),
        (999, "0.999"),
        (1_000, "1.000"),
        (123_456_789, "123456.789"),
        (-1, "-0.001"),
        (-1_500, "-1.500"),
        (None, "-"),
    ],
)
def test_milliseconds_are_written_with_all_three_decimals(
    microseconds: int | None, text: str
) -> None:
    assert milliseconds(microseconds) == text


@given(st.integers(-(10**15), 10**15))
def test_no_microsecond_is_lost_in_writing(microseconds: int) -> None:
    text = milliseconds(microseconds)
    assert int(text.replace(".", "")) == microseconds


@pytest.mark.parametrize(
    ("text", "width"), [("", 0), ("gold", 4), ("标准", 4), ("VIP客户", 7), ("e\u0301", 1)]
)
def test_chinese_characters_take_two_columns(text: str, width: int) -> None:
    assert columns(text) == width


@given(
    st.lists(
        st.lists(st.text("ab 标准", max_size=6), min_size=3, max_size=3), min_size=1, max_size=5
    )
)
def test_all_lines_of_a_table_end_in_the_same_column(rows: list[list[str]]) -> None:
    lines = table(["left", "right", "end|"], [[*row[:2], row[2] + "|"] for row in rows], left=1)
    assert len({columns(line) for line in lines}) == 1


@given(
    st.dictionaries(st.sampled_from(SEGMENTS), st.integers(-(10**9), 10**9)),
    st.integers(1, 300),
)
def test_a_bar_is_as_wide_as_it_should_be_and_shares_it_fairly(
    segments: dict[str, int], width: int
) -> None:
    drawn = bar(segments, width)
    positive = {name: duration for name, duration in segments.items() if duration > 0}
    if not positive:
        assert drawn == ""
        return
    assert len(drawn) == width
    whole = sum(positive.values())
    for name in SEGMENTS:
        share = positive.get(name, 0) * width
        assert share // whole <= drawn.count(LETTERS[name]) <= -(-share // whole)
    order = [LETTERS[name] for name in SEGMENTS if LETTERS[name] in drawn]
    assert [letter for place, letter in enumerate(drawn) if letter not in drawn[:place]] == order


@pytest.mark.parametrize("width", [1, 40, 72, 200])
def test_a_page_keeps_to_its_width(data_dir: Path, width: int) -> None:
    lines = request_text(data_dir, "acme", "req-3", width=width).splitlines()
    assert max(len(line) for line in lines if set(line) <= set(LETTERS.values())) == max(width, 40)
    assert columns(lines[0]) <= max(width, 40)


def test_a_request_that_nobody_knows_is_named(data_dir: Path) -> None:
    with pytest.raises(LogMissing, match="request acme/nobody: expected at least one event"):
        request_text(data_dir, "acme", "nobody")


@pytest.mark.parametrize(
    ("wall_us", "text"),
    [
        (0, "1970-01-01 00:00:00.000000"),
        (1_760_000_000_000_001, "2025-10-09 08:53:20.000001"),
        (2**63 - 1, str(2**63 - 1)),
    ],
)
def test_moments_are_written_in_utc(wall_us: int, text: str) -> None:
    assert utc(wall_us) == text


def test_every_segment_is_a_measure_and_has_a_letter() -> None:
    assert MEASURES[: len(SEGMENTS)] == SEGMENTS
    assert sorted(LETTERS) == sorted(SEGMENTS)
    assert len(set(LETTERS.values())) == len(SEGMENTS)
