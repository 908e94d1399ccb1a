"""What a reader of an answer is shown, whatever is lost on the way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterclock_producer.assembly import Assembly, Piece
from waterclock_proto.requests import Delta, Final, Restarted, Usage


def delta(index: int, text: str, attempt: int = 1) -> Delta:
    return Delta(id="r", attempt=attempt, index=index, text=text, tokens=1)


def restarted(attempt: int) -> Restarted:
    return Restarted(id="r", attempt=attempt)


def final(text: str, attempt: int = 1, **fields) -> Final:
    fields = {"outcome": "completed", "usage": Usage(completion_tokens=9), **fields}
    return Final(tenant="acme", id="r", attempt=attempt, text=text, **fields)


def shown(pieces: list[Piece]) -> str:
    """What stands on a reader's screen at the end."""
    text = ""
    for piece in pieces:
        text = "" if isinstance(piece, Restarted) else text + piece.text
    return text


def assembled(*messages: Delta | Restarted | Final) -> Assembly:
    assembly = Assembly()
    for message in messages:
        if isinstance(message, Final):
            assembly.end(message)
        else:
            assembly.add(message)
    return assembly


@pytest.mark.parametrize(
    ("messages", "pieces", "mended"),
    [
        pytest.param(
            [delta(0, "a"), delta(1, "b"), final("ab")], ["a", "b"], False, id="nothing lost"
        ),
        pytest.param([final("ab")], ["ab"], False, id="not streamed"),
        pytest.param([final("")], [], False, id="an empty answer"),
        pytest.param([delta(0, "a"), final("abc")], ["a", "bc"], True, id="the end lost"),
        pytest.param([delta(0, "a"), delta(2, "c"), final("abc")], ["a", "bc"], True, id="a hole"),
        pytest.param([delta(1, "b"), final("ab")], ["ab"], True, id="the beginning lost"),
        pytest.param(
            [delta(0, "a"), delta(0, "a"), delta(1, "b"), final("ab")],
            ["a", "b"],
            False,
            id="one repeated",
        ),
        pytest.param(
            [delta(0, "a"), restarted(2), delta(1, "z"), delta(0, "b", 2), final("b", 2)],
            ["a", None, "b"],
            False,
            id="late delta of the lost attempt",
        ),
        pytest.param(
            [delta(0, "a"), delta(0, "b", 2), final("b", 2)],
            ["a", None, "b"],
            False,
            id="the restart itself lost",
        ),
        pytest.param(
            [delta(0, "a", 1), final("xyz", 2)],
            ["a", None, "xyz"],
            True,
            id="all of the second attempt lost",
        ),
        pytest.param(
            [delta(0, "a"), final("", outcome="failed")], ["a"], False, id="failed half way"
        ),
        pytest.param(
            [delta(0, "a"), final("", answer_kept=False)], ["a"], False, id="the text not kept"
        ),
        pytest.param(
            [delta(0, "a"), final("ab"), delta(1, "b"), final("c")],
            ["a", "b"],
            True,
            id="late delta, second final",
        ),
    ],
)
def test_pieces(messages: list, pieces: list[str | None], mended: bool) -> None:
    assembly = assembled(*messages)
    found = [None if isinstance(p, Restarted) else p.text for p in assembly.pieces]
    assert (found, assembly.mended) == (pieces, mended)


def test_tokens_of_what_the_final_brings_are_the_rest() -> None:
    assembly = assembled(delta(0, "a"), final("abc"))
    assert [piece.tokens for piece in assembly.pieces if isinstance(piece, Delta)] == [1, 8]


@st.composite
def journeys(draw: st.DrawFn) -> tuple[list[Delta | Restarted], Final]:
    """Attempts that stream, of which any message may be lost or repeated; the last completes."""
    sent: list[Delta | Restarted] = []
    text = ""
    attempts = draw(st.integers(1, 3))
    for attempt in range(1, attempts + 1):
        if attempt > 1 and text:
            sent.append(restarted(attempt))
        texts = draw(st.lists(st.text(max_size=3), max_size=6))
        sent += [delta(index, part, attempt) for index, part in enumerate(texts)]
        text = "".join(texts)
    came = [message for message in sent for _ in range(draw(st.sampled_from((1, 1, 1, 0, 2))))]
    return came, final(text, attempts)


@given(journeys())
def test_a_completed_answer_is_shown_whole_whatever_is_lost(
    journey: tuple[list[Delta | Restarted], Final],
) -> None:
    came, end = journey
    assert shown(assembled(*came, end).pieces) == end.text


@given(journeys())
def test_what_was_shown_is_never_taken_back_without_a_restart(
    journey: tuple[list[Delta | Restarted], Final],
) -> None:
    came, end = journey
    assembly = Assembly()
    before: list[Piece] = []
    for message in came:
        assembly.add(message)
        assert assembly.pieces[: len(before)] == before
        before = list(assembly.pieces)
    assembly.end(end)
    assert assembly.pieces[: len(before)] == before
