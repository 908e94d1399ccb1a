"""Kept bodies stay within their bounds, and are what was put in."""

from hypothesis import given
from hypothesis import strategies as st

from waterclock_runtime.bodies import BodyCache


@given(
    st.lists(st.tuples(st.sampled_from(("put", "take")), st.integers(1, 12), st.integers(0, 40)))
)
def test_a_cache_is_bounded_and_never_mistaken(steps: list[tuple[str, int, int]]) -> None:
    cache = BodyCache(count_max=4, bytes_max=60, body_bytes_max=30)
    put: dict[int, bytes] = {}
    for what, sequence, size in steps:
        if what == "put":
            body = bytes([size]) * size
            if size <= 30:
                put[sequence] = body
            cache.put(sequence, body)
        else:
            found = cache.take(sequence)
            assert found is None or found == put[sequence]
            assert cache.get(sequence) is None
        assert len(cache) <= 4
        assert cache.bytes_held <= 60


def test_the_newest_stay() -> None:
    cache = BodyCache(count_max=2, bytes_max=100, body_bytes_max=50)
    for sequence in (1, 2, 3):
        cache.put(sequence, b"x" * 10)
    assert [cache.get(sequence) for sequence in (1, 2, 3)] == [None, b"x" * 10, b"x" * 10]
    cache.put(4, b"y" * 51)
    assert cache.get(4) is None
    assert cache.take(3) == b"x" * 10
    assert cache.bytes_held == 10
