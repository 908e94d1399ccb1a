"""A producer against a simulated mesh that checks the contract while it serves."""

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from waterclock_producer import (
    AnswerGone,
    AnswerPending,
    Delta,
    Final,
    Handle,
    InFlightFull,
    InvalidSubmission,
    NotStored,
    Producer,
    ProducerClosed,
    ReceiptPending,
    ReceiptsNotKept,
    Restarted,
    Submission,
    new_submission,
    read_receipts,
)
from waterclock_producer.fake import Answer, FakeMesh, ManualClock, settle
from waterclock_producer.limits import STORED_WITHIN_S
from waterclock_proto.subjects import (
    BODY_BYTES_MAX,
    final_subject,
    receipt_subject,
    request_subject,
)


def sent(mesh: FakeMesh, request_id: str) -> list[bytes]:
    """The submissions of one id that the producer published."""
    return [
        payload
        for subject, payload in mesh.published
        if subject == request_subject("acme") and msgspec.json.decode(payload)["id"] == request_id
    ]


async def test_a_request_goes_all_its_way(connected, mesh: FakeMesh) -> None:
    async with connected() as producer:
        handle = await producer.submit(id="r1", prompt="hi", stream=True)
        assert handle.stored_sequence == 1
        receipt = await handle.receipt()
        pieces = [piece.text async for piece in handle.stream() if isinstance(piece, Delta)]
        final = await handle.result()
        assert receipt.outcome == "admitted"
        assert pieces == ["Hello", " world"]
        assert final.text == "Hello world"
        assert (handle.receipt_doubt, handle.mended, producer.in_flight) == ("", False, 0)
        assert producer.receipts("r1") == (receipt,)
    assert (mesh.opened, mesh.closed) == (1, True)


async def test_without_stream_the_final_is_the_only_piece(connected) -> None:
    async with connected() as producer:
        handle = await producer.submit(prompt="hi")
        assert [piece async for piece in handle.stream()] == [
            Delta(id=handle.id, attempt=1, index=0, text="Hello world", tokens=2)
        ]


async def test_times_are_those_of_both_clocks(
    connected, mesh: FakeMesh, clock: ManualClock
) -> None:
    mesh._answer = lambda _: Answer(queue_us=2_000_000, exec_us=1_000_000)
    async with connected() as producer:
        begun_ns, begun_us = clock.mono_ns(), clock.wall_us()
        handle = await producer.submit(prompt="hi", stream=True)
        await clock.advance_ms(4000)
        times = handle.times
        assert times.sent_us == begun_us
        assert times.receipt_ns is not None
        assert times.final_ns is not None
        assert times.receipt_ns - times.sent_ns == 0
        assert times.final_ns - begun_ns == 3_000_000_000
        assert times.first_token_ns == times.last_token_ns == times.final_ns
        assert times.final_us == begun_us + 3_000_000
        assert mesh.submissions[0].sent_us == begun_us


@pytest.mark.parametrize(
    "lose",
    [
        pytest.param("submissions_to_lose", id="not stored"),
        pytest.param("acks_to_lose", id="stored but not said so"),
    ],
)
async def test_what_is_not_acknowledged_is_sent_again_byte_for_byte(
    lose: str, connected, mesh: FakeMesh, clock: ManualClock
) -> None:
    setattr(mesh, lose, 1)
    mesh.receipts_to_lose = 1 if lose == "acks_to_lose" else 0
    mesh.finals_to_lose = mesh.receipts_to_lose
    async with connected() as producer:
        handle = producer.send(new_submission(id="r1", prompt="hi"))
        await settle()
        assert handle.stored_sequence is None
        await clock.advance_ms(2100)
        final = await handle.result()
        assert final.text == "Hello world"
        assert len(sent(mesh, "r1")) == 2
        assert len(set(sent(mesh, "r1"))) == 1
        assert producer.counts.resent == 1


async def test_a_receipt_stands_for_a_lost_acknowledgement(
    connected, mesh: FakeMesh, clock: ManualClock
) -> None:
    mesh.acks_to_lose = 1
    async with connected() as producer:
        handle = await producer.submit(id="r1", prompt="hi")
        await clock.advance_ms(60_000)
        assert handle.stored_sequence == 1
        assert len(sent(mesh, "r1")) == 1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param({"nobody_listens": True}, "nobody listens on wc.request.acme", id="no mesh"),
        pytest.param({"storage_full": True}, r"no space \(10077\)", id="stream full"),
        pytest.param({"submissions_to_lose": 99}, "no answer from the bus", id="silence"),
    ],
)
async def test_what_is_never_acknowledged_ends_with_its_reason(
    fault: dict, reason: str, connected, mesh: FakeMesh, clock: ManualClock
) -> None:
    for name, value in fault.items():
        setattr(mesh, name, value)
    async with connected() as producer:
        handle = producer.send(new_submission(id="r1", prompt="hi"))
        waiting = asyncio.ensure_future(handle.stored())
        await clock.advance_ms(STORED_WITHIN_S * 1000 + 9000)
        with pytest.raises(NotStored, match=reason):
            await waiting
        assert len(set(sent(mesh, "r1"))) == 1
        assert (producer.in_flight, producer.counts.not_stored) == (0, 1)
        mesh.nobody_listens = mesh.storage_full = False
        mesh.submissions_to_lose = 0
        again = producer.send_body("r1", handle.body or b"")
        assert (await again.result()).outcome == "completed"


async def test_a_refusal_is_an_end(connected, mesh: FakeMesh) -> None:
    mesh._answer = lambda _: Answer(reject="requests_per_minute", retry_after_ms=700)
    async with connected(report_delivery=True) as producer:
        handle = await producer.submit(prompt="hi")
        final = await handle.result()
        assert (final.outcome, final.reject_reason) == ("rejected", "requests_per_minute")
        assert final.retry_after_ms == 700
        assert (await handle.receipt()).outcome == "rejected"
        assert [piece async for piece in handle.stream()] == []
    assert mesh.claims == []


async def test_cancelling(connected, mesh: FakeMesh) -> None:
    mesh._answer = lambda _: Answer(lost=True)
    async with connected() as producer:
        handle = await producer.submit(id="r1", prompt="hi")
        await producer.cancel("r1")
        assert (await handle.result()).outcome == "cancelled"
    assert mesh.cancelled == ["r1"]


async def test_after_a_gap_what_was_said_meanwhile_is_asked_for(
    connected, mesh: FakeMesh, clock: ManualClock
) -> None:
    mesh._answer = lambda _: Answer(queue_us=50_000, exec_us=50_000)
    async with connected() as producer:
        handles = [await producer.submit(id=f"r{n}", prompt="hi", stream=True) for n in range(5)]
        mesh.disconnect()
        await clock.advance_ms(1000)
        assert producer.in_flight == 5
        mesh.reconnect()
        finals = [await handle.result() for handle in handles]
        assert [final.text for final in finals] == ["Hello world"] * 5
        assert producer.counts.resumed == 5
        # The question was put once, and never answered by a second run.
        assert Counter(s.id for s in mesh.submissions if s.resume) == {f"r{n}": 1 for n in range(5)}
        assert [len(sent(mesh, f"r{n}")) for n in range(5)] == [2] * 5
    assert producer.counts.finals_repeated == 0


async def test_what_was_submitted_while_away_goes_out_afterwards(
    connected, mesh: FakeMesh, clock: ManualClock
) -> None:
    async with connected() as producer:
        mesh.disconnect()
        handle = producer.send(new_submission(id="r1", prompt="hi"))
        await clock.advance_ms(5000)
        assert sent(mesh, "r1") == []
        mesh.reconnect()
        assert (await handle.result()).outcome == "completed"
        assert len(sent(mesh, "r1")) == 1


async def test_a_lost_answer_to_the_question_is_asked_for_after_the_next_gap(
    connected, mesh: FakeMesh, clock: ManualClock
) -> None:
    mesh._answer = lambda _: Answer(exec_us=50_000)
    mesh.finals_to_lose = 1
    async with connected() as producer:
        handle = await producer.submit(id="r1", prompt="hi")
        await clock.advance_ms(100)
        mesh.hold = True
        mesh.reconnect()
        await settle()
        mesh.disconnect()
        mesh.release()
        await settle()
        assert not handle.ended
        mesh.reconnect()
        assert (await handle.result()).text == "Hello world"
        assert producer.counts.resumed == 2


async def test_a_refused_question_is_put_again_and_ends_nothing(
    connected, mesh: FakeMesh, clock: ManualClock
) -> None:
    mesh._answer = lambda _: Answer(lost=True)
    mesh.resumes_to_refuse = 2
    async with connected() as producer:
        handle = await producer.submit(id="r1", prompt="hi")
        mesh.reconnect()
        await settle()
        assert not handle.ended
        await clock.advance_ms(1200)
        mesh.end("r1", text="late")
        assert (await handle.result()).text == "late"
        assert [receipt.outcome for receipt in handle.receipts] == [
            "admitted",
            "rejected",
            "rejected",
            "resubmitted",
        ]


async def test_a_refusal_of_somebody_elses_submission_ends_nothing(
    connected, mesh: FakeMesh
) -> None:
    mesh._answer = lambda _: Answer(lost=True)
    async with connected() as producer:
        handle = await producer.submit(id="r1", prompt="hi")
        await settle()
        mesh._reject("r1", 77, "id_reused", None)
        assert not handle.ended
        mesh.end("r1", text="mine")
        assert (await handle.result()).text == "mine"


async def test_cancelling_is_said_again_after_a_gap(connected, mesh: FakeMesh) -> None:
    mesh._answer = lambda _: Answer(lost=True)
    async with connected() as producer:
        handle = await producer.submit(id="r1", prompt="hi")
        mesh.finals_to_lose = 1
        await producer.cancel("r1")
        await settle()
        mesh.reconnect()
        assert (await handle.result()).outcome == "cancelled"
    assert mesh.cancelled == ["r1", "r1"]


async def test_resuming_what_another_process_submitted(connected, mesh: FakeMesh) -> None:
    async with connected() as producer:
        await (await producer.submit(id="r1", prompt="hi")).result()
        await settle()
        handle = await producer.resume("r1")
        assert (await handle.result()).text == "Hello world"
        assert (await handle.receipt()).outcome == "resubmitted"


async def test_a_late_receipt_of_the_request_is_no_answer_to_the_question(
    connected, mesh: FakeMesh
) -> None:
    """Receipt and answer come from different services, so the answer may be there first."""
    async with connected() as producer:
        first = await producer.submit(id="r1", prompt="hi")
        await first.result()
        late = msgspec.json.encode(await first.receipt())
        await settle()
        handle = producer.send(Submission(id="r1", resume=True))
        mesh.send_raw(receipt_subject("acme", "r1"), late)
        await settle()
        assert handle.final is not None
        assert [receipt.outcome for receipt in handle.receipts] == ["admitted", "resubmitted"]


async def test_resuming_what_nobody_knows(connected) -> None:
    async with connected() as producer:
        final = await (await producer.resume("r1")).result()
        assert (final.outcome, final.reject_reason) == ("rejected", "unknown_request")


async def test_resuming_what_is_no_longer_kept(
    connected, mesh: FakeMesh, clock: ManualClock
) -> None:
    mesh.gone.add("r1")
    async with connected() as producer:
        handle = await producer.resume("r1")
        await clock.advance_ms(3000)
        with pytest.raises(AnswerGone, match="r1"):
            await handle.result()
        assert (await handle.receipt()).resubmitted_outcome == "gone"


async def test_resuming_what_is_open_here_gives_its_handle(connected, mesh: FakeMesh) -> None:
    mesh._answer = lambda _: Answer(lost=True)
    async with connected() as producer:
        handle = await producer.submit(id="r1", prompt="hi")
        assert await producer.resume("r1") is handle
        await settle()
        assert not handle.ended
        assert [receipt.outcome for receipt in handle.receipts] == ["admitted", "resubmitted"]


async def test_a_second_final_is_dropped(connected, mesh: FakeMesh) -> None:
    mesh.receipts_to_lose = 1
    async with connected() as producer:
        handle = await producer.submit(id="r1", prompt="hi")
        final = await handle.result()
        mesh.say(Final(tenant="acme", id="r1", outcome="failed"), on_final=True)
        assert await handle.result() is final
        assert producer.counts.finals_repeated == 1


async def test_a_lost_attempt_is_taken_back_before_the_next_is_shown(
    connected, mesh: FakeMesh
) -> None:
    mesh._answer = lambda _: Answer(lost=True)
    async with connected() as producer:
        handle = await producer.submit(id="r1", prompt="hi", stream=True)
        await settle()
        mesh.say(Delta(id="r1", attempt=1, index=0, text="Goo", tokens=1))
        mesh.say(Restarted(id="r1", attempt=2))
        mesh.say(Delta(id="r1", attempt=2, index=0, text="Hello", tokens=1))
        mesh.end("r1", text="Hello")
        texts = [
            None if isinstance(piece, Restarted) else piece.text async for piece in handle.stream()
        ]
        assert texts == ["Goo", None, "Hello"]


async def test_a_contradicting_receipt_is_said(connected, mesh: FakeMesh) -> None:
    mesh.wrong_commitments = True
    async with connected() as producer:
        handle = await producer.submit(prompt="hi")
        await handle.receipt()
        assert "commitment" in handle.receipt_doubt
        assert producer.counts.receipts_doubted == 1


async def test_receipts_are_in_the_folder_before_anybody_hears_of_them(
    connected, tmp_path: Path
) -> None:
    async with connected(receipts=tmp_path) as producer:
        handle = await producer.submit(id="r1", prompt="hi")
        await handle.receipt()
        kept, wrong = read_receipts(tmp_path / "acme.receipts.jsonl")
        assert wrong == []
        assert [line.body for line in kept] == [(handle.body or b"").decode()]


async def test_nothing_is_submitted_whose_receipt_could_not_be_kept(
    connected, tmp_path: Path
) -> None:
    async with connected(receipts=tmp_path) as producer:
        producer._book.problem = ReceiptsNotKept("full")
        with pytest.raises(ReceiptsNotKept):
            await producer.submit(prompt="hi")


async def test_delivery_is_claimed_once_with_the_producers_own_stamps(
    connected, mesh: FakeMesh, clock: ManualClock
) -> None:
    mesh._answer = lambda _: Answer(exec_us=1_000_000)
    async with connected(report_delivery=True) as producer:
        begun_us = clock.wall_us()
        handle = await producer.submit(id="r1", prompt="hi", stream=True)
        await clock.advance_ms(2000)
        await handle.result()
        await settle()
    (claim,) = mesh.claims
    assert (claim.id, claim.sent_us, claim.receipt_us) == ("r1", begun_us, begun_us)
    assert claim.first_token_us == claim.last_token_us == begun_us + 1_000_000


async def test_delivery_is_claimed_also_where_the_receipt_never_comes(
    connected, mesh: FakeMesh, clock: ManualClock
) -> None:
    mesh.receipts_to_lose = 1
    async with connected(report_delivery=True) as producer:
        await (await producer.submit(id="r1", prompt="hi")).result()
        await clock.advance_ms(61_000)
    assert [claim.receipt_us for claim in mesh.claims] == [None]


async def test_what_does_not_concern_us_is_not_even_read(connected, mesh: FakeMesh) -> None:
    async with connected() as producer:
        mesh.send_raw(final_subject("acme", "another"), b"not json")
        mesh.send_raw(receipt_subject("acme", "another"), b"not json")
        assert producer.counts.malformed == 0


async def test_what_cannot_be_read_is_counted_and_passed_over(connected, mesh: FakeMesh) -> None:
    mesh._answer = lambda _: Answer(lost=True)
    async with connected() as producer:
        handle = await producer.submit(id="r1", prompt="hi")
        await settle()
        for payload in (b"", b"{", b"\xff", b'{"kind":"final"}', b'{"kind":"other"}'):
            mesh.send_raw(final_subject("acme", "r1"), payload)
        other = Final(tenant="acme", id="r2", outcome="completed")
        mesh.send_raw(final_subject("acme", "r1"), msgspec.json.encode(other))
        assert not handle.ended
        assert producer.counts.malformed == 6


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="no prompt"),
        pytest.param({"prompt": "x", "messages": ()}, id="prompt and messages"),
        pytest.param({"prompt": "x", "id": "a.b"}, id="an id of two tokens"),
        pytest.param({"prompt": "x", "id": ""}, id="an empty id"),
        pytest.param({"prompt": "x", "max_tokens": 0}, id="no tokens"),
        pytest.param({"prompt": "\ud800"}, id="no text"),
        pytest.param({"prompt": "x" * BODY_BYTES_MAX}, id="too large"),
    ],
)
async def test_a_bad_submission_is_refused_before_it_is_sent(
    fields: dict, connected, mesh: FakeMesh
) -> None:
    async with connected() as producer:
        with pytest.raises(InvalidSubmission):
            await producer.submit(**fields)
    assert mesh.published == []


async def test_an_id_in_flight_is_refused_and_can_be_used_again_later(
    connected, mesh: FakeMesh
) -> None:
    async with connected() as producer:
        first = producer.send(Submission(id="r1", prompt="hi", sent_us=1))
        with pytest.raises(InvalidSubmission, match="r1"):
            producer.send(Submission(id="r1", prompt="hi", sent_us=1))
        await first.result()
        second = await producer.submit(Submission(id="r1", prompt="hi", sent_us=1))
        assert (await second.receipt()).outcome == "resubmitted"
        assert (await second.result()).text == "Hello world"


async def test_too_many_open_requests_are_refused(connected, mesh: FakeMesh) -> None:
    mesh._answer = lambda _: Answer(lost=True)
    async with connected(in_flight_max=2) as producer:
        for _ in range(2):
            await producer.submit(prompt="hi")
        with pytest.raises(InFlightFull, match="2"):
            await producer.submit(prompt="hi")


async def test_waiting_has_an_end_and_can_be_taken_up_again(connected, mesh: FakeMesh) -> None:
    mesh._answer = lambda _: Answer(lost=True)
    mesh.receipts_to_lose = 1
    async with connected() as producer:
        handle = await producer.submit(id="r1", prompt="hi")
        with pytest.raises(ReceiptPending, match="r1"):
            await handle.receipt(timeout_s=0)
        with pytest.raises(AnswerPending, match="r1"):
            await handle.result(timeout_s=0)
        mesh.end("r1", text="now")
        assert (await handle.result(timeout_s=0)).text == "now"


async def test_closing_fails_what_is_open_and_nothing_else(connected, mesh: FakeMesh) -> None:
    ends: list[Handle] = []
    async with connected() as producer:
        done = await producer.submit(prompt="hi")
        await done.result()
        mesh._answer = lambda _: Answer(lost=True)
        open_ = producer.send(new_submission(prompt="hi"), on_end=ends.append)
        waiting = asyncio.ensure_future(open_.result())
        await settle()
    with pytest.raises(ProducerClosed):
        await waiting
    assert (await done.result()).outcome == "completed"
    assert ends == [open_]
    with pytest.raises(ProducerClosed):
        await producer.submit(prompt="hi")
    await producer.close()


async def test_a_bug_leaves_nobody_waiting(mesh: FakeMesh, clock: ManualClock) -> None:
    producer = Producer(mesh, tenant="acme", clock=clock)
    await producer.open()
    mesh._in = []  # So that the fake calls the next publish a broken contract.
    handle = producer.send(new_submission(prompt="hi"))
    with pytest.raises(ProducerClosed, match="stopped working"):
        await handle.result()
    with pytest.raises(ProducerClosed):
        await producer.submit(prompt="hi")
    await producer.close()
    assert len(mesh.violations) == 1
    mesh.violations.clear()
