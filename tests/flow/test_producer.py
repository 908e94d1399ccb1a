"""The ordinary way through the real mesh, as a program with the producer library sees it."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from drill import Drill, drilled
from drill_mesh import MODEL
from flow_plan import SLOW, SLOW_SLOTS, flow_plan
from open_load import MARK_EN, MARK_ZH
from waterclock_producer import Delta, Handle, Producer, new_submission, receipt_doubt
from waterclock_proto.requests import Final

pytestmark = pytest.mark.asyncio(loop_scope="module")

EN = f"Please describe how a {MARK_EN} measures time in the night and why nobody repairs it."
ZH = f"请说明{MARK_ZH}为什么可以分辨是非,并且告诉我它在法庭上的用处是什么。"
SLOW_TOKENS = 1000
"""About five seconds on the slow worker: nothing here waits for their end."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drill(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Drill]:
    async with drilled(tmp_path_factory.mktemp("mesh"), flow_plan()) as running:
        yield running


@pytest.fixture
def acme(drill: Drill) -> Producer:
    return drill.producers.by_tenant["acme"]


async def submit(drill: Drill, tenant: str = "acme", **fields: object) -> Handle:
    fields.setdefault("prompt", EN)
    handle = await drill.producers.by_tenant[tenant].submit(**fields)  # pyright: ignore[reportArgumentType] - a test's own fields
    return drill.producers.keep(tenant, handle)


async def busy_slots(drill: Drill) -> list[Handle]:
    """Fill the slow worker's slots, and return once its engine runs both."""
    handles = [
        await submit(drill, model=SLOW, max_tokens=SLOW_TOKENS, ignore_eos=True, stream=True)
        for _ in range(SLOW_SLOTS)
    ]
    await drill.until("both run", lambda: all(handle.pieces for handle in handles))
    return handles


def event_of(drill: Drill, handle: Handle, tenant: str = "acme"):
    return drill.checker.recount.requests[tenant, handle.id]


async def test_a_stream_comes_in_pieces_and_ends_in_a_final_with_both_clocks(drill: Drill) -> None:
    handle = await submit(drill, max_tokens=24, ignore_eos=True, stream=True)
    pieces = [piece async for piece in handle.stream()]
    final = await handle.result(timeout_s=10)
    receipt = await handle.receipt(timeout_s=5)
    deltas = [piece for piece in pieces if isinstance(piece, Delta)]
    assert len(deltas) > 4
    assert "".join(piece.text for piece in deltas) == final.text
    assert sum(piece.tokens for piece in deltas) == final.usage.completion_tokens == 24
    assert [piece.index for piece in deltas] == list(range(len(deltas)))
    assert (final.outcome, final.finish_reason, final.model_served) == (
        "completed",
        "length",
        MODEL,
    )
    assert receipt_doubt(receipt, handle.body) == ""
    timings = final.timings
    assert timings is not None
    assert timings.queue_us is not None
    assert timings.exec_us is not None
    assert timings.queue_us + timings.exec_us == timings.total_us == sum(timings.segments.values())
    assert timings.total_us > timings.exec_us > 0
    assert deltas[0].queue_us is not None
    assert abs(deltas[0].queue_us - timings.queue_us) < 2
    # What the producer saw from outside brackets what the mesh says of itself.
    seen_us = (handle.times.final_ns - handle.times.sent_ns) // 1000  # pyright: ignore[reportOptionalOperand] - it ended
    assert timings.total_us < seen_us
    await drill.check()


async def test_without_a_stream_the_answer_comes_whole(drill: Drill) -> None:
    handle = await submit(drill, max_tokens=9, ignore_eos=True)
    final = await handle.result(timeout_s=10)
    assert (final.outcome, len(final.text.split())) == ("completed", 9)
    assert handle.pieces[-1].text == final.text  # pyright: ignore[reportAttributeAccessIssue] - the one piece is a delta
    await drill.check()


async def test_a_chat_runs_like_a_prompt(drill: Drill) -> None:
    handle = await submit(
        drill,
        prompt=None,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": EN}],
        max_tokens=4,
    )
    assert (await handle.result(timeout_s=10)).outcome == "completed"


@pytest.mark.parametrize(
    ("prompt", "pool"), [pytest.param(ZH, "zh", id="zh"), pytest.param(EN, "en", id="en")]
)
async def test_a_text_goes_to_the_pool_of_its_language(
    drill: Drill, prompt: str, pool: str
) -> None:
    handle = await submit(drill, prompt=prompt, max_tokens=4)
    await handle.result(timeout_s=10)
    await drill.check()
    dispatched = event_of(drill, handle).attempts[1]
    assert dispatched["pool"] == pool
    assert dispatched["worker"].startswith(f"{pool}-1-")


async def test_a_hint_is_believed_before_the_text(drill: Drill) -> None:
    handle = await submit(drill, prompt=EN, language="zh", max_tokens=4)
    await handle.result(timeout_s=10)
    await drill.check()
    assert event_of(drill, handle).attempts[1]["pool"] == "zh"


async def test_what_is_cancelled_in_the_queue_never_runs(drill: Drill, acme: Producer) -> None:
    running = await busy_slots(drill)
    waiting = await submit(drill, model=SLOW, max_tokens=50)
    await waiting.receipt(timeout_s=5)
    await acme.cancel(waiting.id)
    final = await waiting.result(timeout_s=8)
    assert (final.outcome, final.text, final.usage.completion_tokens) == ("cancelled", "", 0)
    assert not any(handle.ended for handle in running)
    for handle in running:
        await acme.cancel(handle.id)
    report = await drill.check()
    request = event_of(drill, waiting)
    assert request.end is not None
    assert request.end["phase"] == "queued"
    assert request.attempts == {}
    assert report.lost_attempts == 0


async def test_what_is_cancelled_while_it_runs_stops_and_keeps_what_it_made(
    drill: Drill, acme: Producer
) -> None:
    handle = await submit(drill, model=SLOW, max_tokens=SLOW_TOKENS, ignore_eos=True, stream=True)
    await drill.until("it runs", lambda: len(handle.pieces) > 5)
    await acme.cancel(handle.id)
    final = await handle.result(timeout_s=8)
    assert final.outcome == "cancelled"
    assert 5 < final.usage.completion_tokens < SLOW_TOKENS
    await drill.check()
    end = event_of(drill, handle).end
    assert end is not None
    assert (end["phase"], end["output_tokens"]) == ("running", final.usage.completion_tokens)


async def test_a_cancel_before_the_request_cancels_it(drill: Drill, acme: Producer) -> None:
    await acme.cancel("early-1")
    await asyncio.sleep(0.2)
    handle = await submit(drill, id="early-1", model=SLOW, max_tokens=SLOW_TOKENS)
    assert (await handle.result(timeout_s=5)).outcome == "cancelled"
    await drill.check()


async def test_what_expires_in_the_queue_never_runs(drill: Drill) -> None:
    running = await busy_slots(drill)
    waiting = await submit(drill, model=SLOW, max_tokens=50, deadline_ms=300)
    final = await waiting.result(timeout_s=8)
    assert (final.outcome, final.usage.completion_tokens) == ("expired", 0)
    assert final.timings is not None
    assert 300_000 <= final.timings.total_us < 1_200_000
    for handle in running:
        await drill.producers.by_tenant["acme"].cancel(handle.id)
    await drill.check()
    request = event_of(drill, waiting)
    assert request.end is not None
    assert request.end["phase"] == "queued"
    assert request.attempts == {}


async def test_what_expires_while_it_runs_is_stopped(drill: Drill) -> None:
    handle = await submit(
        drill, model=SLOW, max_tokens=4000, ignore_eos=True, deadline_ms=400, stream=True
    )
    final = await handle.result(timeout_s=8)
    assert final.outcome == "expired"
    assert 0 < final.usage.completion_tokens < 200
    assert final.timings is not None
    assert 400_000 <= final.timings.total_us < 1_300_000
    await drill.check()
    end = event_of(drill, handle).end
    assert end is not None
    assert end["phase"] == "running"


@pytest.mark.parametrize(
    ("deadline", "reason"),
    [
        pytest.param(
            lambda: {"deadline_us": time.time_ns() // 1000 - 1}, "deadline_passed", id="past"
        ),
        pytest.param(lambda: {"deadline_us": 1}, "deadline_passed", id="1970"),
        pytest.param(lambda: {"deadline_ms": 26 * 3600 * 1000}, "deadline_too_far", id="too far"),
    ],
)
async def test_a_deadline_that_cannot_be_met_is_refused(
    drill: Drill, deadline, reason: str
) -> None:
    handle = await submit(drill, **deadline())
    final = await handle.result(timeout_s=5)
    assert (final.outcome, final.reject_reason) == ("rejected", reason)
    assert final.detail
    receipt = await handle.receipt()
    assert (receipt.outcome, receipt.number is not None) == ("rejected", True)


async def test_another_connection_gets_the_outcome_by_its_id(drill: Drill) -> None:
    handle = await submit(drill, max_tokens=5, ignore_eos=True)
    final = await handle.result(timeout_s=10)
    mesh = drill.mesh
    async with Producer.connect(
        mesh.bus_url, tenant="acme", user="acme", password=mesh.access.tenants["acme"].password
    ) as other:
        resumed = await other.resume(handle.id)
        assert await resumed.result(timeout_s=5) == final
        receipt = await resumed.receipt(timeout_s=5)
        assert (receipt.outcome, receipt.resubmitted_outcome) == ("resubmitted", "completed")
        unknown = await other.resume("never-was")
        refused = await unknown.result(timeout_s=5)
        assert (refused.outcome, refused.reject_reason) == ("rejected", "unknown_request")
    await drill.check()


async def test_another_connection_waits_for_what_still_runs(drill: Drill) -> None:
    handle = await submit(drill, model=SLOW, max_tokens=80, ignore_eos=True, stream=True)
    await drill.until("it runs", lambda: handle.pieces)
    mesh = drill.mesh
    async with Producer.connect(
        mesh.bus_url, tenant="acme", user="acme", password=mesh.access.tenants["acme"].password
    ) as other:
        resumed = await other.resume(handle.id)
        assert (await resumed.receipt(timeout_s=5)).resubmitted_outcome == "open"
        assert await resumed.result(timeout_s=5) == await handle.result(timeout_s=5)
    await drill.check()


async def test_one_id_with_one_body_runs_once(drill: Drill, acme: Producer) -> None:
    handle = await submit(drill, max_tokens=6, ignore_eos=True)
    first = await handle.result(timeout_s=10)
    assert handle.body is not None
    again = acme.send_body(handle.id, handle.body)
    assert await again.result(timeout_s=5) == first
    receipt = await again.receipt(timeout_s=5)
    assert (receipt.outcome, receipt.resubmitted_outcome) == ("resubmitted", "completed")
    await drill.check()
    assert len(event_of(drill, handle).attempts) == 1


async def test_one_id_with_another_body_is_refused(drill: Drill, acme: Producer) -> None:
    handle = await submit(drill, max_tokens=6, ignore_eos=True)
    first = await handle.result(timeout_s=10)
    other = acme.send(new_submission(id=handle.id, prompt="something else", max_tokens=6))
    refused = await other.result(timeout_s=5)
    assert (refused.outcome, refused.reject_reason) == ("rejected", "id_reused")
    resumed = await acme.resume(handle.id)
    assert await resumed.result(timeout_s=5) == first
    await drill.check()


async def test_an_outcome_asked_for_at_the_very_end_is_never_said_to_be_gone(
    drill: Drill, acme: Producer
) -> None:
    """The end stands on the tape a moment before the answer is stored."""
    mesh = drill.mesh
    answers: list[Final] = []
    async with Producer.connect(
        mesh.bus_url, tenant="acme", user="acme", password=mesh.access.tenants["acme"].password
    ) as other:
        for number in range(40):
            handle = await submit(drill, id=f"edge-{number}", max_tokens=2, ignore_eos=True)
            await asyncio.sleep(number * 0.0002)
            resumed = await other.resume(handle.id)
            answers.append(await resumed.result(timeout_s=5))
            assert await handle.result(timeout_s=5) == answers[-1]
    assert {(final.outcome, final.answer_kept) for final in answers} == {("completed", True)}
    await drill.check()


async def test_tenants_have_ids_and_numbers_of_their_own(drill: Drill) -> None:
    handles = {
        tenant: await submit(drill, tenant, id="shared-1", max_tokens=3)
        for tenant in ("acme", "globex", "initech")
    }
    finals = [await handle.result(timeout_s=10) for handle in handles.values()]
    assert [final.tenant for final in finals] == list(handles)
    assert {final.outcome for final in finals} == {"completed"}
    numbers = [(await handle.receipt()).number for handle in handles.values()]
    assert numbers[1:] == [1, 1]
    await drill.check()
    tiers = [event_of(drill, handles[name], name).admitted["tier"] for name in handles]
    assert tiers == ["gold", "standard", "standard"]


async def test_a_claim_of_delivery_is_quoted_once(drill: Drill) -> None:
    mesh = drill.mesh
    async with Producer.connect(
        mesh.bus_url,
        tenant="acme",
        user="acme",
        password=mesh.access.tenants["acme"].password,
        report_delivery=True,
    ) as reporting:
        handle = drill.producers.keep(
            "acme", await reporting.submit(prompt=EN, max_tokens=3, ignore_eos=True)
        )
        await handle.result(timeout_s=10)
        await handle.receipt(timeout_s=5)
        await drill.until("claimed", lambda: reporting.counts.claims)
        await asyncio.sleep(0.3)
    report = await drill.check()
    assert report.recount.kinds["delivered"] == 1
