"""``check_mesh`` can fail: each way to tamper with a good mesh's evidence is seen, and named."""

import copy
import os
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from drill import Drill, drilled
from drill_mesh import processes_of
from flow_plan import SLOW, SLOW_SLOTS, flow_plan
from mesh_checks import Evidence, find_after_stop, find_faults
from mesh_watch import Said, Stored
from open_load import MARK_EN, LoadShape, prompt
from tape_recount import Recount
from waterclock_producer import new_submission

Event = dict[str, Any]
Change = Callable[[Evidence], object]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drill(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Drill]:
    async with drilled(tmp_path_factory.mktemp("mesh"), flow_plan()) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def good(drill: Drill) -> Evidence:
    """Of a mesh that answered, refused, cancelled, and lost an attempt."""
    acme = drill.producers.by_tenant["acme"]
    await drill.producers.drive(LoadShape(seed=7, rate=100, seconds=0.6))
    running = [
        drill.producers.keep(
            "acme",
            await acme.submit(
                prompt=prompt(random.Random(n), 9, chinese=False),
                model=SLOW,
                max_tokens=60,
                ignore_eos=True,
                stream=True,
            ),
        )
        for n in range(SLOW_SLOTS + 1)
    ]
    await drill.until("two run", lambda: sum(bool(handle.pieces) for handle in running) == 2)
    await acme.cancel(running[0].id)
    drill.mesh.kill("slow-1")
    same, other = drill.sent("acme")[:2]
    for handle in (same, other):
        await handle.result(timeout_s=10)
        await handle.receipt(timeout_s=10)
    assert same.body is not None
    drill.producers.keep("acme", acme.send_body(same.id, same.body))
    drill.producers.keep("acme", acme.send(new_submission(id=other.id, prompt="another")))
    drill.producers.keep("acme", acme.send_body("wrong-1", b'{"id":"wrong-1"}'))
    await drill.ready(["slow-1"])
    report = await drill.check()
    assert report.lost_attempts >= 1
    assert report.reasons["id_reused"] == 1
    return await drill.checker.evidence()


def test_a_good_mesh_has_no_faults(good: Evidence) -> None:
    assert find_faults(good) == []


# --- the tape, before it was read


def retold(evidence: Evidence, tape: list[Stored]) -> None:
    evidence.tape = tape
    evidence.recount = Recount(evidence.slots).take_all(tape)


def place_of(evidence: Evidence, kind: str, *, last: bool = False) -> int:
    places = [
        place
        for place, stored in enumerate(evidence.tape)
        if stored.subject.startswith(f"wc.event.{kind}.")
    ]
    return places[-1 if last else 0]


def edited(stored: Stored, change: Callable[[Event], object]) -> Stored:
    envelope = msgspec.json.decode(stored.payload)
    change(envelope)
    return msgspec.structs.replace(stored, payload=msgspec.json.encode(envelope))


def edit_event(kind: str, change: Callable[[Event], object], *, last: bool = False) -> Change:
    def tamper(evidence: Evidence) -> None:
        tape = list(evidence.tape)
        place = place_of(evidence, kind, last=last)
        tape[place] = edited(tape[place], change)
        retold(evidence, tape)

    return tamper


def drop_event(kind: str) -> Change:
    def tamper(evidence: Evidence) -> None:
        tape = list(evidence.tape)
        del tape[place_of(evidence, kind)]
        retold(evidence, tape)

    return tamper


def say_again(kind: str, change: Callable[[Event], object]) -> Change:
    """Append the last event of a kind once more, changed, as its writer's newest."""

    def tamper(evidence: Evidence) -> None:
        tape = list(evidence.tape)

        def renumber(envelope: Event) -> None:
            envelope["counter"] += 1_000_000
            change(envelope)

        newest = edited(tape[place_of(evidence, kind, last=True)], renumber)
        tape.append(msgspec.structs.replace(newest, sequence=tape[-1].sequence + 1))
        retold(evidence, tape)

    return tamper


def data(**fields: Any) -> Callable[[Event], object]:
    return lambda envelope: envelope["data"].update(fields)


def nothing(_: Event) -> None:
    pass


TAPES = [
    pytest.param(drop_event("enqueued"), "tape: sequence", id="an event is missing"),
    pytest.param(
        edit_event("completed", data(output_tokens=1)), "leaves: at sequence", id="an event differs"
    ),
    pytest.param(
        say_again("completed", data(output_tokens=77)), "two ends of one attempt", id="two ends"
    ),
    pytest.param(
        say_again("admitted", data(requests_sequence=1)), "admitted twice", id="admitted twice"
    ),
    pytest.param(
        say_again("admitted", data(id="forged")), "decided 2 times", id="decided twice"
    ),
    pytest.param(
        edit_event("admitted", data(number=4_000), last=True), "numbers: ", id="a number is missing"
    ),
    pytest.param(
        say_again("dispatched", data(attempt=9)), "dispatched after its end", id="a late dispatch"
    ),
    pytest.param(
        edit_event("dispatched", data(worker="nobody-000000")),
        "by a worker that was not given it",
        id="another worker's work",
    ),
    pytest.param(
        edit_event("completed", lambda envelope: envelope.update(type="waterclock.cancelled.v1")),
        "nobody asked for it",
        id="an end that nobody asked for",
    ),
    pytest.param(
        edit_event("dispatched", lambda e: e["data"]["dispatched"].update(wall_us=2**60)),
        "dispatched after its deadline",
        id="a dispatch after the deadline",
    ),
    pytest.param(
        edit_event("completed", lambda e: e["data"]["ended"].update(mono_ns=1)),
        "clocks: ",
        id="a moment was moved",
    ),
    pytest.param(
        edit_event("completed", lambda e: e.update(fence=0, source="/waterclock/scheduler")),
        "has none",
        id="an end of a deposed writer",
    ),
    pytest.param(
        edit_event("started", lambda envelope: envelope.update(id="x", counter=0)),
        "says something else under",
        id="two events under one counter",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tamper", "named"), TAPES)
def test_a_tape_that_was_changed_is_seen(good: Evidence, tamper: Change, named: str) -> None:
    assert_named(good, tamper, named)


# --- the record, on disk


def leaf_files(evidence: Evidence) -> list[Path]:
    return sorted(evidence.ledger.rglob("leaves-*.bin"))


def leaf_places(content: bytes) -> list[int]:
    places, at = [], 0
    while at < len(content):
        places.append(at)
        at += 2 + int.from_bytes(content[at : at + 2])
    return places


def flip_a_byte(evidence: Evidence) -> None:
    file = leaf_files(evidence)[0]
    content = bytearray(file.read_bytes())
    content[leaf_places(bytes(content))[40] + 300] ^= 0x01
    file.write_bytes(content)


def drop_a_leaf(evidence: Evidence) -> None:
    file = leaf_files(evidence)[0]
    content = file.read_bytes()
    first, after = leaf_places(content)[50:52]
    file.write_bytes(content[:first] + content[after:])


def cut_the_end_off(evidence: Evidence) -> None:
    file = leaf_files(evidence)[-1]
    content = file.read_bytes()
    file.write_bytes(content[: leaf_places(content)[-30]])


def another_stamp(evidence: Evidence) -> None:
    file = leaf_files(evidence)[0]
    content = bytearray(file.read_bytes())
    content[leaf_places(bytes(content))[20] + 2 + 16] ^= 0x01
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        pytest.param(flip_a_byte, "leaves: at sequence 41", id="a byte was flipped"),
        pytest.param(flip_a_byte, "record: ", id="and the ledger's own check says so"),
        pytest.param(drop_a_leaf, "leaves: at sequence 51", id="a leaf was dropped"),
        pytest.param(drop_a_leaf, "record: ", id="and the ledger's own check says so too"),
        pytest.param(cut_the_end_off, "leaves: none for sequence", id="the end was cut off"),
        pytest.param(another_stamp, "another stored_ns", id="a stamp was changed"),
    ],
)
def test_a_record_that_was_changed_is_seen(
    good: Evidence, tmp_path: Path, tamper: Change, named: str
) -> None:
    shutil.copytree(good.ledger, tmp_path / "ledger")
    assert_named(good, tamper, named, ledger=tmp_path / "ledger")


# --- what was said to producers


def edit_receipt(change: Callable[[Event], object]) -> Change:
    def tamper(evidence: Evidence) -> None:
        place = next(
            place
            for place, said in enumerate(evidence.receipts)
            if msgspec.json.decode(said.payload)["outcome"] == "admitted"
        )
        receipt = msgspec.json.decode(evidence.receipts[place].payload)
        change(receipt)
        said = evidence.receipts[place]
        evidence.receipts[place] = Said(said.at_ns, said.subject, msgspec.json.encode(receipt))

    return tamper


def edit_final(change: Callable[[Event], object], *, beside: bool = False) -> Change:
    def tamper(evidence: Evidence) -> None:
        key = next(k for k, r in evidence.recount.requests.items() if r.end_kind == "completed")
        final = msgspec.json.decode(evidence.finals[key][0])
        change(final)
        changed = [msgspec.json.encode(final)]
        evidence.finals[key] = evidence.finals[key] + changed if beside else changed

    return tamper


def forget_final(evidence: Evidence) -> None:
    key = next(
        key
        for key, request in evidence.recount.requests.items()
        if request.end is not None and str(request.end["worker"]).startswith("en-1")
    )
    del evidence.finals[key]
    subject = f"wc.final.{key[0]}.{key[1]}"
    evidence.answers = [stored for stored in evidence.answers if stored.subject != subject]


def answer_early(evidence: Evidence) -> None:
    evidence.answers[0] = msgspec.structs.replace(evidence.answers[0], stored_ns=1)


def edit_claim(change: Callable[[Any], object]) -> Change:
    def tamper(evidence: Evidence) -> None:
        claim = next(claim for claim in evidence.claims if claim.shown and claim.receipts)
        change(claim)

    return tamper


def forge_receipt_of_claim(claim: Any) -> None:
    first = claim.receipts[0]
    claim.receipts = (msgspec.structs.replace(first, sequence=first.sequence + 1),)


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        pytest.param(
            edit_receipt(lambda r: r.update(event=r["event"].replace('"tier":"', '"tier":"x'))),
            "does not stand on the tape",
            id="a forged event in a receipt",
        ),
        pytest.param(
            edit_receipt(lambda r: r.update(salt="00" * 32)), "salt does not prove", id="a salt"
        ),
        pytest.param(
            edit_receipt(lambda r: r.update(number=r["number"] + 1)), "number", id="a number"
        ),
        pytest.param(
            edit_receipt(lambda r: r.update(stored_ns=r["stored_ns"] + 1)),
            "stored at",
            id="a stamp",
        ),
        pytest.param(
            edit_receipt(lambda r: r.update(incarnation="i0")), "incarnation", id="another tape"
        ),
        pytest.param(
            edit_claim(forge_receipt_of_claim), "does not stand on the tape", id="a held receipt"
        ),
        pytest.param(
            edit_final(lambda f: f.update(outcome="failed")), "says failed", id="another outcome"
        ),
        pytest.param(
            edit_final(lambda f: f["usage"].update(completion_tokens=5_000)),
            "5000 found",
            id="more tokens",
        ),
        pytest.param(edit_final(lambda f: f.update(attempt=7)), "of attempt 7", id="an attempt"),
        pytest.param(
            edit_final(lambda f: f.update(text="another"), beside=True),
            "2 different ones",
            id="two answers",
        ),
        pytest.param(
            edit_final(lambda f: f["timings"].update(total_us=1)), "do not sum", id="a total"
        ),
        pytest.param(forget_final, "none was sent", id="no answer"),
        pytest.param(answer_early, "before its end was on the tape", id="an answer too early"),
        pytest.param(
            edit_claim(lambda c: setattr(c, "final", None)), "has no final", id="no final"
        ),
        pytest.param(
            edit_claim(lambda c: setattr(c, "shown", "x")), "does not join", id="a torn stream"
        ),
        pytest.param(
            edit_claim(lambda c: setattr(c, "error", "NotStored")), "gave up", id="a lost request"
        ),
    ],
)  # fmt: skip
def test_what_was_said_to_producers_is_compared(good: Evidence, tamper: Change, named: str) -> None:
    assert_named(good, tamper, named)


# --- all else


def one_more_submission(evidence: Evidence) -> None:
    last = evidence.requests[-1]
    evidence.requests.append(msgspec.structs.replace(last, sequence=last.sequence + 1))


def fewer_slots(evidence: Evidence) -> None:
    evidence.slots["slow-1"] = 1
    retold(evidence, evidence.tape)


def dispatched_to_the_lost(evidence: Evidence) -> None:
    given_ns, life, _, _ = evidence.recount.dispatches[-1]
    evidence.recount = copy.deepcopy(evidence.recount)
    evidence.recount.dispatches.append((given_ns, life, 5, "restarted"))


def dispatched_to_the_silent(evidence: Evidence) -> None:
    given_ns, life, _, _ = evidence.recount.dispatches[-1]
    evidence.recount = copy.deepcopy(evidence.recount)
    lost_ns = evidence.tape[-1].stored_ns
    evidence.recount.dispatches.append((given_ns, life, lost_ns, "lease"))
    evidence.beats[life] = [(lost_ns - 3 * 10**9, given_ns - 3 * 10**9)]
    evidence.breaks = []


def in_public(text: Callable[[Evidence], str]) -> Change:
    def tamper(evidence: Evidence) -> None:
        evidence.public["logs/worker.log"] = f"… {text(evidence)} …".encode()

    return tamper


def an_answer(evidence: Evidence) -> str:
    texts = [msgspec.json.decode(final[0]).get("text", "") for final in evidence.finals.values()]
    return max(texts, key=len)


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        pytest.param(one_more_submission, "is decided 0 times", id="nobody decided it"),
        pytest.param(fewer_slots, "too many at once: 2 on slow-1", id="too many at once"),
        pytest.param(dispatched_to_the_lost, "after it was lost", id="work for the dead"),
        pytest.param(dispatched_to_the_silent, "was not heard since", id="work for the silent"),
        pytest.param(in_public(lambda _: MARK_EN), "prompt word", id="a prompt in a log"),
        pytest.param(in_public(an_answer), "answer", id="an answer in a log"),
        pytest.param(
            in_public(lambda _: "Traceback (most recent call last):"), "logs: ", id="a traceback"
        ),
        pytest.param(
            in_public(lambda e: e.secrets["password of acme"]), "password of acme", id="a password"
        ),
    ],
)
def test_other_faults_are_seen(good: Evidence, tamper: Change, named: str) -> None:
    if tamper.__name__ == "fewer_slots":
        # Two ran at once before one of them was cancelled, and the killed worker's third.
        assert good.recount.busy_max["slow-1"] == SLOW_SLOTS
    assert_named(good, tamper, named)


def test_a_process_that_is_left_is_seen(tmp_path: Path, good: Evidence) -> None:
    shutil.copytree(good.ledger, tmp_path / "ledger")
    assert list(find_after_stop(tmp_path)) == []
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(30)"],
        env={**os.environ, "WATERCLOCK_SERVICE__DATA_DIR": str(tmp_path)},
    )
    try:
        while not processes_of(tmp_path):
            assert left.poll() is None
        assert any(f"process {left.pid}" in fault for fault in find_after_stop(tmp_path))
    finally:
        left.kill()
        left.wait()


def assert_named(good: Evidence, tamper: Change, named: str, **fields: Any) -> None:
    evidence = msgspec.structs.replace(
        good,
        receipts=list(good.receipts),
        finals={key: list(finals) for key, finals in good.finals.items()},
        answers=list(good.answers),
        requests=list(good.requests),
        claims=[copy.copy(claim) for claim in good.claims],
        slots=dict(good.slots),
        beats=dict(good.beats),
        public=dict(good.public),
        **fields,
    )
    tamper(evidence)
    faults = find_faults(evidence)
    assert any(named in fault for fault in faults), faults
