"""Public traces become loads; what is no trace is refused with its line."""

import gzip
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterclock.arrivals import Prompts
from waterclock.traces import Arrival, TraceOptions, TraceRefused, plan_trace, read_trace
from waterclock_proto.requests import estimate_prompt_tokens

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.9799607,4808,10
2023-11-17 00:00:00.0000000,110,27
2023-11-17 00:01:59.9799600,7,3
"""
MOONCAKE = """\
{"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 600, "output_length": 6, "hash_ids": [0, 2]}
{"timestamp": 6500, "input_length": 512, "output_length": 7, "hash_ids": [3]}
"""


def trace(folder: Path, text: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_azure_stamps_are_whole_ticks_of_100_ns(tmp_path: Path) -> None:
    # From 23:59:59.9799607 to midnight are 20,039.3 µs, to the last 119,999,999.3.
    assert list(read_trace(trace(tmp_path, AZURE))) == [
        Arrival(at_us=0, input_tokens=4808, output_tokens=10),
        Arrival(at_us=20_039, input_tokens=110, output_tokens=27),
        Arrival(at_us=119_999_999, input_tokens=7, output_tokens=3),
    ]


def test_mooncake_blocks_are_kept(tmp_path: Path) -> None:
    assert list(read_trace(trace(tmp_path, MOONCAKE))) == [
        Arrival(at_us=0, input_tokens=1000, output_tokens=5, blocks=(0, 1)),
        Arrival(at_us=0, input_tokens=600, output_tokens=6, blocks=(0, 2)),
        Arrival(at_us=3_500_000, input_tokens=512, output_tokens=7, blocks=(3,)),
    ]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(gzip.compress(AZURE.encode()), id="gzipped"),
        pytest.param(AZURE.replace("\n", "\r\n"), id="lines of Windows"),
        pytest.param("\ufeff" + AZURE, id="byte order mark"),
        pytest.param(AZURE.removesuffix("\n"), id="no last line feed"),
        pytest.param(AZURE + "\n", id="an empty last line"),
        pytest.param(AZURE.replace(".9799607,", ".9799607+00:00,"), id="with its zone"),
    ],
)
def test_other_wrappings_of_the_same(text: str | bytes, tmp_path: Path) -> None:
    expected = list(read_trace(trace(tmp_path, AZURE)))
    assert list(read_trace(trace(tmp_path, text, "other"))) == expected


ROW = "2023-11-16 18:17:03.9799600,4808,10"


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        pytest.param("", "", "empty file", id="empty"),
        pytest.param("a,b\n", "1", "'a,b'", id="another table"),
        pytest.param(f"{ROW}\n", "1", "4808", id="no header"),
        pytest.param(f"{AZURE}oops\n", "5", "'oops'", id="not a row"),
        pytest.param(f"{AZURE}{ROW},1\n", "5", "4808,10,1", id="a column too many"),
        pytest.param(AZURE + ROW.replace("4808", "-1") + "\n", "5", "-1", id="below zero"),
        pytest.param(AZURE + ROW.replace("4808", "4.5") + "\n", "5", "4.5", id="half a token"),
        pytest.param(AZURE + ROW.replace("11-16", "02-30") + "\n", "5", "02-30", id="no such day"),
        pytest.param(AZURE + ROW.replace("18:", "24:") + "\n", "5", "24:", id="no such hour"),
        pytest.param(f"{AZURE}{ROW}\n", "5", "earlier", id="out of order"),
        pytest.param(AZURE.split("\n", maxsplit=1)[0] + "\n", "", "none found", id="no rows"),
        pytest.param("{\n", "1", "'{'", id="half an object"),
        pytest.param(MOONCAKE + "[1]\n", "4", "[1]", id="not an object"),
        pytest.param(MOONCAKE.replace("3000", "3000.5", 1), "1", "3000.5", id="half a millisecond"),
        pytest.param(MOONCAKE.replace('"output_length": 6, ', ""), "2", "600", id="a field less"),
        pytest.param(MOONCAKE.replace("[0, 2]", "[0]"), "2", "1 found", id="a block too few"),
        pytest.param(MOONCAKE.replace("[0, 2]", "[0, -2]"), "2", ">= 0", id="a block below zero"),
        pytest.param(MOONCAKE.replace("6500", "2999"), "3", "1000 µs earlier", id="back in time"),
        pytest.param(AZURE.encode() + b"\xff\n", "5", "UTF-8", id="not text"),
        pytest.param(gzip.compress(AZURE.encode())[:-12], "", "gzip", id="half a gzip file"),
        pytest.param(b"\x1f\x8bnothing", "1", "gzip", id="not really gzip"),
        pytest.param(b"x" * 1_100_000, "1", "1000000 bytes", id="one endless line"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(
    text: str | bytes, line: str, found: str, tmp_path: Path
) -> None:
    with pytest.raises(TraceRefused) as refused:
        list(read_trace(trace(tmp_path, text)))
    assert f"trace:{line}" in str(refused.value)
    assert found in str(refused.value)
    assert "expected" in str(refused.value)
    assert len(str(refused.value)) < 500


@given(st.text(max_size=200) | st.binary(max_size=200))
def test_any_file_is_read_or_refused(tmp_path_factory, content: str | bytes) -> None:
    raw = content if isinstance(content, bytes) else content.encode(errors="replace")
    path = tmp_path_factory.mktemp("any") / "trace"
    path.write_bytes(raw)
    with pytest.raises(TraceRefused):
        list(read_trace(path))


def test_speed_makes_arrivals_denser_and_deadlines_shorter(tmp_path: Path) -> None:
    options = TraceOptions(
        path=trace(tmp_path, AZURE), speed=Fraction(5, 2), tenants={"acme": 1}, deadline_ms=1001
    )
    planned = list(plan_trace(options))
    assert [one.at_us for one in planned] == [0, 8_015, 47_999_999]
    assert [one.deadline_ms for one in planned] == [400] * 3
    assert [one.max_tokens for one in planned] == [10, 27, 3]


@pytest.mark.parametrize(
    ("bounds", "count"),
    [({"limit": 2}, 2), ({"minutes": 1}, 2), ({"minutes": 2}, 3), ({"limit": 0}, 0), ({}, 3)],
)
def test_bounds(bounds: dict, count: int, tmp_path: Path) -> None:
    options = TraceOptions(path=trace(tmp_path, AZURE), tenants={"acme": 1}, **bounds)
    assert len(list(plan_trace(options))) == count


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"speed": Fraction(0)}, "speed"),
        ({"tenants": {}}, "at least one"),
        ({"tenants": {"a": 0}}, "at least one"),
        ({"tenants": {"a": -1}}, "-1"),
        ({"languages": {"fr": 1}}, "fr"),
    ],
)
def test_options_that_cannot_be(fields: dict, found: str, tmp_path: Path) -> None:
    options = {"path": tmp_path / "absent", "tenants": {"a": 1}, **fields}
    with pytest.raises(ValueError, match=found):
        plan_trace(TraceOptions(**options))


def test_equal_blocks_are_equal_prefixes(tmp_path: Path) -> None:
    options = TraceOptions(path=trace(tmp_path, MOONCAKE), tenants={"acme": 1})
    first, second, third = (one.text() for one in plan_trace(options))
    assert first[: 4 * 512] == second[: 4 * 512]
    assert first[4 * 512 : 4 * 600] != second[4 * 512 :]
    assert third[:20] != first[:20]


def test_the_same_seed_makes_the_same_load(tmp_path: Path) -> None:
    def load(seed: int) -> list[tuple]:
        options = TraceOptions(
            path=trace(
                tmp_path, AZURE + "".join(f"2023-11-18 00:00:00,9,{n}\n" for n in range(50))
            ),
            tenants={"acme": 1, "globex": 1},
            languages={"en": 1, "zh": 1},
            seed=seed,
        )
        return [(one.tenant, one.language, one.text(), one.at_us) for one in plan_trace(options)]

    assert load(1) == load(1)
    assert load(1) != load(2)
    assert {one[:2] for one in load(1)} == {
        (tenant, language) for tenant in ("acme", "globex") for language in ("en", "zh")
    }


def test_a_prompt_that_no_submission_can_hold_is_cut_and_says_so(tmp_path: Path) -> None:
    text = f"{AZURE.splitlines()[0]}\n2023-11-16 18:17:03,9000000,1\n"
    options = TraceOptions(path=trace(tmp_path, text), tenants={"acme": 1})
    (planned,) = plan_trace(options)
    assert planned.cut
    assert len(planned.text().encode()) <= 1_000_000 - 8192


@given(
    language=st.sampled_from(("en", "zh")),
    tokens=st.integers(1, 100_000),
    number=st.integers(0, 10**9),
)
def test_texts_have_exactly_the_wanted_length(language, tokens: int, number: int) -> None:
    text = PROMPTS.text(language, tokens, number)
    assert estimate_prompt_tokens(text) == tokens
    assert text.isascii() == (language == "en")
    blocks = range(number, number + -(-tokens // 512))
    assert estimate_prompt_tokens(PROMPTS.blocks(language, tokens, blocks)) == tokens


PROMPTS = Prompts()


@pytest.mark.parametrize(
    ("file", "count", "minutes", "tokens"),
    [
        ("traces-azure-2023/code.csv.gz", 7338, 39, 7437),
        ("traces-azure-2023/conv.csv.gz", 14404, 40, 14050),
        ("traces-mooncake-fast25/conversation_trace.jsonl.gz", 8125, 41, 124847),
        ("traces-mooncake-fast25/synthetic_trace.jsonl.gz", 2730, 11, 191374),
    ],
)
def test_the_real_traces(
    file: str, count: int, minutes: int, tokens: int, shared_data: Path
) -> None:
    path = shared_data / "data" / file
    if not path.is_file():
        pytest.skip(f"{file} is absent from the data beside the repository")
    arrivals = list(read_trace(path))
    assert len(arrivals) == count
    assert arrivals[-1].at_us // 60_000_000 == minutes
    assert max(arrival.input_tokens for arrival in arrivals) == tokens
    options = TraceOptions(path=path, tenants={"acme": 1}, languages={"zh": 1, "en": 1}, limit=200)
    for arrival, planned in zip(arrivals, plan_trace(options), strict=False):
        assert estimate_prompt_tokens(planned.text()) == arrival.input_tokens
