"""Leaves: bytes that are one stored event and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto_values import TEXT
from waterclock_proto.leaves import (
    LEAF_BYTES_MAX,
    Leaf,
    LeafRefused,
    decode_leaf,
    encode_leaf,
)
from waterclock_proto.names import I64_MAX

SEQUENCES = st.integers(1, I64_MAX)
EVENT_LEAVES = st.builds(
    Leaf,
    sequence=SEQUENCES,
    stored_ns=st.integers(0, I64_MAX),
    subject=st.text(TEXT, max_size=100),
    payload=st.binary(max_size=300),
    hole=st.just(False),
)
HOLES = st.builds(Leaf, sequence=SEQUENCES, hole=st.just(True))
LEAVES = EVENT_LEAVES | HOLES
HEAD_BYTES = 19


@given(LEAVES)
def test_what_is_encoded_is_decoded(leaf: Leaf) -> None:
    assert decode_leaf(encode_leaf(leaf)) == leaf


@given(LEAVES, LEAVES)
def test_different_leaves_have_different_bytes(one: Leaf, other: Leaf) -> None:
    assert (encode_leaf(one) == encode_leaf(other)) == (one == other)


@given(st.binary(max_size=60) | LEAVES.map(encode_leaf), st.data())
def test_decoding_accepts_exactly_what_encoding_makes(encoded: bytes, data: st.DataObject) -> None:
    damaged = bytearray(encoded)
    if damaged:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    for candidate in (encoded, bytes(damaged), encoded[:-1], encoded + b"\0"):
        try:
            leaf = decode_leaf(candidate)
        except LeafRefused:
            continue
        assert encode_leaf(leaf) == candidate


def test_the_layout_is_the_documented_one() -> None:
    leaf = Leaf(sequence=0x0102, stored_ns=0x0304, subject="é", payload=b"\xff{}")
    assert encode_leaf(leaf).hex(" ") == (
        "01 00 00 00 00 00 00 01 02 00 00 00 00 00 00 03 04 00 02 c3 a9 ff 7b 7d"
    )
    assert encode_leaf(Leaf(sequence=3, hole=True)).hex(" ") == (
        "02 00 00 00 00 00 00 00 03 00 00 00 00 00 00 00 00 00 00"
    )


def test_the_largest_leaf_fits_and_no_larger_one() -> None:
    room = LEAF_BYTES_MAX - HEAD_BYTES
    encoded = encode_leaf(Leaf(sequence=1, subject="s", payload=b"x" * (room - 1)))
    assert len(encoded) == LEAF_BYTES_MAX
    assert decode_leaf(encoded).payload == b"x" * (room - 1)
    with pytest.raises(LeafRefused, match="leaf of 65536 bytes, at most 65535 allowed"):
        encode_leaf(Leaf(sequence=1, subject="s", payload=b"x" * room))
    with pytest.raises(LeafRefused, match="leaf of 65536 bytes, at most 65535 allowed"):
        decode_leaf(encoded + b"x")
    with pytest.raises(LeafRefused, match="at most 65535 allowed"):
        encode_leaf(Leaf(sequence=1, subject="s" * 70_000))


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        pytest.param(Leaf(sequence=0), "sequence 0, expected 1 to", id="no position"),
        pytest.param(Leaf(sequence=-1), "sequence -1, expected 1 to", id="negative"),
        pytest.param(Leaf(sequence=2**63), "expected 1 to 9223372036854775807", id="too far"),
        pytest.param(Leaf(sequence=1, stored_ns=-1), "stored at -1 ns", id="before 1970"),
        pytest.param(Leaf(sequence=1, stored_ns=2**63), "expected 0 to", id="late"),
        pytest.param(Leaf(sequence=1, subject="\ud800"), "not Unicode text", id="surrogate"),
        pytest.param(Leaf(sequence=1, subject="s", hole=True), "must be empty", id="hole, subject"),
        pytest.param(
            Leaf(sequence=1, payload=b"p", hole=True), "must be empty", id="hole, payload"
        ),
        pytest.param(Leaf(sequence=1, stored_ns=5, hole=True), "must be empty", id="hole, stamp"),
    ],
)
def test_no_leaf_is_made_of_what_no_stream_holds(leaf: Leaf, expected: str) -> None:
    with pytest.raises(LeafRefused, match=expected):
        encode_leaf(leaf)


@pytest.mark.parametrize(
    ("encoded", "expected"),
    [
        pytest.param("", "leaf of 0 bytes, at least 19 expected", id="empty"),
        pytest.param("01" + "00" * 17, "leaf of 18 bytes", id="half a head"),
        pytest.param("03" + "00" * 7 + "01" + "00" * 10, "leaf of kind 3", id="unknown kind"),
        pytest.param("01" + "00" * 18, "sequence 0", id="no position"),
        pytest.param("01" + "ff" * 8 + "00" * 10, "expected 1 to", id="sequence"),
        pytest.param("01" + "00" * 7 + "01" + "00" * 8 + "0003" + "61", "1 are there", id="short"),
        pytest.param("01" + "00" * 7 + "01" + "00" * 8 + "0001" + "ff", "not UTF-8", id="UTF-8"),
        pytest.param("02" + "00" * 7 + "01" + "00" * 10 + "00", "must be empty", id="hole, more"),
        pytest.param(
            "02" + "00" * 7 + "01" + "00" * 7 + "01" + "0000", "must be empty", id="stamp"
        ),
    ],
)
def test_what_is_no_leaf_is_refused_and_told_why(encoded: str, expected: str) -> None:
    with pytest.raises(LeafRefused, match=expected):
        decode_leaf(bytes.fromhex(encoded))
