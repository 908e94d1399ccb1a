"""Putting deltas together."""

from hypothesis import given
from hypothesis import strategies as st

from waterclock_admission.exchange import Text
from waterclock_proto.requests import Delta


def delta(index: int, text: str, attempt: int = 1) -> Delta:
    return Delta(id="r", attempt=attempt, index=index, text=text, tokens=1)


def begun() -> Text:
    text = Text()
    text.restart(1)
    return text


def test_pieces_in_order_are_sent_as_they_come() -> None:
    text = begun()
    assert [text.take(delta(0, "a")), text.take(delta(1, "b"))] == ["a", "b"]
    assert text.rest("ab") == ""


def test_what_comes_again_is_not_sent_again() -> None:
    text = begun()
    assert [text.take(delta(0, "a")), text.take(delta(0, "a")), text.take(delta(1, "b"))] == [
        "a",
        "",
        "b",
    ]


def test_an_older_attempts_piece_is_nobodys() -> None:
    text = Text()
    text.restart(2)
    assert text.take(delta(0, "old", attempt=1)) == ""
    assert text.rest("new") == "new"


def test_an_answer_that_does_not_go_on_from_what_was_sent_has_no_rest() -> None:
    text = begun()
    text.take(delta(0, "a"))
    assert text.rest("other") is None


@given(st.lists(st.text(max_size=5), max_size=8), st.data())
def test_whatever_is_lost_or_out_of_order_the_client_gets_the_whole_text(
    pieces: list[str], data: st.DataObject
) -> None:
    arrived = data.draw(
        st.lists(st.sampled_from(range(len(pieces))), max_size=12) if pieces else st.just([])
    )
    text = begun()
    sent = "".join(text.take(delta(index, pieces[index])) for index in arrived)
    whole = "".join(pieces)
    rest = text.rest(whole)
    assert rest is not None
    assert sent + rest == whole
