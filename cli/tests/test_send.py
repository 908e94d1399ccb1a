"""One request at a terminal: the answer as it comes, then where the time went."""

import asyncio
import io

import msgspec
import pytest

from waterclock.send import SendOptions, SendResult, render_send, send_one
from waterclock_producer import AnswerPending, Final, Producer
from waterclock_producer.fake import Answer, FakeMesh, settle
from waterclock_proto.requests import Delta, Restarted, Timings


@pytest.fixture
def mesh():
    mesh = FakeMesh("acme")
    yield mesh
    assert mesh.violations == []


async def send(mesh: FakeMesh, out: io.StringIO, **options) -> SendResult:
    return await send_one(
        SendOptions(**{"tenant": "acme", "prompt": "hi", **options}),
        out,
        connect=lambda: Producer(mesh, tenant="acme"),
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_the_answer_then_the_outcome(mesh: FakeMesh, stream: bool) -> None:
    out = io.StringIO()
    result = await send(mesh, out, stream=stream, deadline_ms=5000, language="en")
    text = out.getvalue()
    answer, _, outcome, receipt = text.splitlines()[:4]
    assert answer == "Hello world"
    assert outcome == "completed (stop) by fake: 0 prompt and 2 output tokens"
    assert receipt.startswith(f"receipt: request {result.id} admitted, number 1 of this tenant, ")
    assert "queue clock" in text
    (submission,) = mesh.submissions
    assert (submission.stream, submission.deadline_ms, submission.language) == (stream, 5000, "en")


async def test_a_refusal_says_what_to_do(mesh: FakeMesh) -> None:
    mesh._answer = lambda _: Answer(reject="requests_per_minute", retry_after_ms=1200)
    out = io.StringIO()
    result = await send(mesh, out)
    assert result.final.outcome == "rejected"
    assert "rejected (requests_per_minute)" in out.getvalue()
    assert "try again after 1,200 ms" in out.getvalue()


async def test_a_lost_attempt_is_said(mesh: FakeMesh) -> None:
    mesh._answer = lambda _: Answer(lost=True)
    out = io.StringIO()
    task = asyncio.ensure_future(send(mesh, out))
    await settle()
    request_id = mesh.submissions[0].id
    mesh.say(Delta(id=request_id, attempt=1, index=0, text="Goo", tokens=1))
    mesh.say(Restarted(id=request_id, attempt=2))
    mesh.say(Delta(id=request_id, attempt=2, index=0, text="Hello", tokens=1))
    mesh.end(request_id, text="Hello")
    await task
    said, _, again = out.getvalue().partition("[The worker was lost; the answer starts again.]\n")
    assert (said, again.splitlines()[0]) == ("Goo\n", "Hello")


async def test_an_answer_cannot_steer_the_terminal(mesh: FakeMesh) -> None:
    mesh._answer = lambda _: Answer(texts=("a\x1b[2Jb\n\tc\r\x07\u202e", "水钟"))
    out = io.StringIO()
    await send(mesh, out)
    assert out.getvalue().startswith("a\ufffd[2Jb\n\tc\ufffd\ufffd\ufffd水钟\n")


async def test_interrupting_cancels(mesh: FakeMesh) -> None:
    mesh._answer = lambda _: Answer(lost=True)
    task = asyncio.ensure_future(send(mesh, io.StringIO()))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert mesh.cancelled == [mesh.submissions[0].id]


async def test_no_answer_in_time_names_the_request(mesh: FakeMesh) -> None:
    mesh._answer = lambda _: Answer(lost=True)
    with pytest.raises(AnswerPending, match=r"request [0-9a-f]{32}"):
        await send(mesh, io.StringIO(), timeout_s=0)


async def test_a_contradicting_receipt_is_a_warning(mesh: FakeMesh) -> None:
    mesh.wrong_commitments = True
    out = io.StringIO()
    await send(mesh, out)
    assert "WARNING: commitment" in out.getvalue()


FINAL = Final(
    tenant="acme",
    id="r1",
    outcome="completed",
    finish_reason="stop",
    text="x",
    timings=Timings(
        arrival_us=1,
        queue_us=3_500,
        exec_us=1_230_000,
        total_us=1_233_500,
        segments={"decode": 1_000_000, "bus": 500, "queue": 3_000, "prefill": 230_000},
    ),
)


def rendered(**timings) -> list[str]:
    assert FINAL.timings is not None
    final = msgspec.structs.replace(
        FINAL, timings=msgspec.structs.replace(FINAL.timings, **timings)
    )
    return render_send(
        SendResult(
            id="r1",
            final=final,
            receipt=None,
            receipt_doubt="",
            latency_us=1_240_001,
            first_token_us=240_000,
        )
    ).splitlines()


def test_segments_stand_in_the_order_of_a_requests_life() -> None:
    assert rendered() == [
        "completed (stop): 0 prompt and 0 output tokens",
        "receipt: none came for request r1",
        "",
        "bus                      0.500 ms",
        "queue                    3.000 ms",
        "prefill                230.000 ms  ██████",
        "decode               1,000.000 ms  ██████████████████████████████",
        "total                1,233.500 ms",
        "queue clock              3.500 ms",
        "execution clock      1,230.000 ms",
        "seen here: the end after 1,240.001 ms, first text after 240.000 ms",
    ]


def test_segments_that_do_not_sum_are_a_warning() -> None:
    (line,) = [line for line in rendered(total_us=1_233_501) if "WARNING" in line]
    assert line == "WARNING: the segments sum to 1,233.500 ms, 1,233.501 ms expected"


def test_a_negative_segment_is_shown_and_said() -> None:
    lines = rendered(segments={"bus": -20, "decode": 1_233_520})
    assert "bus                     -0.020 ms  the clocks disagree" in lines
    assert not any("WARNING" in line for line in lines)


def test_an_unknown_segment_comes_last() -> None:
    lines = rendered(segments={"novel": 3_500, "decode": 1_230_000})
    assert [line.split()[0] for line in lines[3:5]] == ["decode", "novel"]
