"""``check_mesh``: what must hold of a mesh after whatever was done to it, seen from outside alone.

Evidence is what anybody with the right connection could collect: the streams message by message,
the ledger's files byte by byte, what producers sent and got, what stands in logs and metrics.
``find_faults`` judges it and names everything that must not be. It reads the tape by its own
rules (``tape_recount``), beside the ledger's own check, so that two implementations must agree.

| | what is looked at |
|---|---|
| tape | sequences without a hole; the record is the tape, leaf by leaf |
| record | the ledger's own check finds no violation, and nothing open |
| decisions | every submission is decided exactly once; numbers are 1 … n for each tenant |
| ends | every admitted request has exactly one end that counts; slots and lives are respected |
| receipts | name bytes that stand on the tape; the salt proves the body |
| finals | agree with the end that counts; one for each request; none before its evidence |
| clocks | segments sum exactly; nothing negative without a flag |
| logs | no service met an error that it has no name for |
| secrets | no prompt, answer or password in events, record, logs, health or metrics |
| replay | with everything stopped, twice the same bytes; no process is left |
"""

import asyncio
import hashlib
import hmac
import io
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from drill_mesh import DrillMesh, processes_of
from mesh_watch import Said, Stored, Watch
from tape_recount import Decision, Key, Recount, Request, measure
from waterclock.replay import run_replay
from waterclock_ledger import check as ledger_check
from waterclock_ledger.files import LogDamaged, LogMissing
from waterclock_ledger.record import read_record
from waterclock_producer import Handle, Producer, Restarted
from waterclock_proto.requests import Final as FinalAnswer
from waterclock_proto.requests import Receipt

NAMED_MAX: Final = 12
"""Of one sort of fault so many are named; the rest is counted."""
ANSWERS_SEARCHED: Final = 40
SNIPPET: Final = 28
BEAT_NS: Final = 1_000_000_000
BREAK_NS: Final = 5_000_000_000


class Claim(Struct, kw_only=True):
    """What one producer holds about one request."""

    tenant: str
    id: str
    body: bytes | None = None
    """What it submitted; None if it only asked for the outcome."""
    receipts: tuple[Receipt, ...] = ()
    final: FinalAnswer | None = None
    shown: str | None = None
    """What the deltas after the last restart join to; None without deltas."""
    error: str = ""


class Submitted(Struct, frozen=True):
    """One message of REQUESTS."""

    sequence: int
    stored_ns: int
    subject: str
    body: bytes

    @property
    def tenant(self) -> str:
        return self.subject.rpartition(".")[2]


class Evidence(Struct, kw_only=True):
    """Everything that a judgement rests on."""

    tape: list[Stored]
    requests: list[Submitted]
    answers: list[Stored]
    ledger: Path
    """The ledger's folder."""
    incarnation: str
    receipts: list[Said]
    """All that were sent to anybody."""
    finals: dict[Key, list[bytes]]
    """The distinct finals that were sent to anybody."""
    claims: list[Claim]
    tenants: tuple[str, ...]
    slots: dict[str, int]
    beats: dict[str, list[tuple[int, int]]]
    breaks: list[int]
    killed: tuple[str, ...]
    public: dict[str, bytes]
    """Logs, health, metrics and files that must hold no secret, by name."""
    secrets: dict[str, str]
    """What must not be found, by what it is."""
    recount: Recount


class Report(Struct, kw_only=True):
    """What was looked at, for tests to say more about."""

    events: int
    submissions: int
    requests: int
    outcomes: dict[str, int]
    reasons: dict[str, int]
    lost_attempts: int
    superseded: int
    repeated: int
    fenced: int
    flagged: int
    """Requests with a segment that two clocks could not agree on."""
    elections: dict[str, int]
    busy_max: dict[str, int]
    recount: Recount
    """The one that goes on reading: it grows with the next check, as all else here does not."""


async def check_mesh(checker: "MeshChecker", wait_s: float = 30.0) -> Report:
    """Wait until the mesh has settled, collect all evidence, judge it.

    Raises:
        AssertionError: with every fault that was found.
    """
    evidence = await checker.evidence(wait_s)
    faults = await asyncio.to_thread(find_faults, evidence)
    assert not faults, f"{len(faults)} faults:\n  " + "\n  ".join(faults)
    return report_of(evidence)


async def check_mesh_and_stop(checker: "MeshChecker", wait_s: float = 30.0) -> Report:
    """``check_mesh``, then stop everything: the record alone must answer, and no process is left.

    Raises:
        AssertionError: with every fault that was found.
    """
    report = await check_mesh(checker, wait_s)
    await checker.mesh.stop()
    faults = list(find_after_stop(checker.mesh.data_dir))
    assert not faults, "\n".join(faults)
    return report


class MeshChecker:
    """Checks one mesh as often as wanted; what was read before is not read again."""

    def __init__(self, mesh: DrillMesh, watch: Watch, *, marks: Sequence[str] = ()) -> None:
        """``marks`` are words that stand in prompts and nowhere else."""
        self.mesh = mesh
        self.watch = watch
        self.claims: list[Claim] = []
        self._marks = tuple(marks)
        self._tape: list[Stored] = []
        self._requests: list[Submitted] = []
        slots = {name: mesh.slots(name) for name in mesh.workers}
        self.recount = Recount(slots)

    def hold(self, handles: Iterable[Handle], tenant: str) -> None:
        """Take what a producer has into every check from now on."""
        self.claims += [claim_of(handle, tenant) for handle in handles]

    async def settle(self, wait_s: float = 30.0) -> Recount:
        """Wait until every submission is decided and every admitted request has ended.

        Raises:
            AssertionError: that did not happen in time.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + wait_s
        while True:
            await self._read_on()
            still_open, undecided = self.recount.open(), self._undecided()
            if not still_open and not undecided:
                return self.recount
            if loop.time() > give_up_s:
                names = ", ".join(still_open[:NAMED_MAX])
                raise AssertionError(
                    f"{len(still_open)} open ({names}), {len(undecided)} undecided"
                    f" ({undecided[:NAMED_MAX]}) after {wait_s:g} s\n{self.state()}"
                )
            await asyncio.sleep(0.15)

    async def finish(
        self, handles: Iterable[Handle], producer: Producer, wait_s: float = 20.0
    ) -> None:
        """Wait for the finals of requests that have ended; ask again where one was lost.

        A worker that is killed between its end and its answer leaves a producer without one. The
        outcome then has to be asked for.

        Raises:
            AssertionError: a handle is still without a final after it was asked for.
        """
        waiting = [handle for handle in handles if not handle.ended]
        await _all_ended(waiting, 2.0)
        for handle in waiting:
            if not handle.ended:
                await producer.resume(handle.id)
        await _all_ended(waiting, wait_s)
        missing = [handle.id for handle in waiting if not handle.ended]
        assert not missing, f"no final after asking again: {missing[:NAMED_MAX]}\n{self.state()}"

    async def evidence(self, wait_s: float = 30.0) -> Evidence:
        """Collect everything, once the mesh has settled and the ledger has kept up."""
        await self.settle(wait_s)
        mesh, watch = self.mesh, self.watch
        ledger = mesh.data_dir / "ledger"
        last = self._tape[-1].sequence
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + wait_s
        while (leaves := sum(1 for _ in read_leaves(ledger))) < last:
            assert loop.time() < give_up_s, f"ledger: {last} leaves expected, {leaves} found"
            await asyncio.sleep(0.1)
        answers = await watch.stream("ANSWERS")
        public = await asyncio.to_thread(self._public)
        return Evidence(
            tape=list(self._tape),
            requests=list(self._requests),
            answers=answers,
            ledger=ledger,
            incarnation=_incarnation(self._tape),
            receipts=list(watch.receipts),
            finals={key: list(payloads) for key, payloads in watch.finals.items()},
            claims=list(self.claims),
            tenants=tuple(mesh.config["tenants"]),
            slots=dict(self.recount.slots),
            beats={life: list(times) for life, times in watch.beats.items()},
            breaks=list(watch.breaks),
            killed=tuple(sorted(mesh.killed)),
            public=public,
            secrets=self._secrets(),
            recount=self.recount,
        )

    def state(self) -> str:
        """Health of all services and the ends of their logs, for an error message."""
        lines: list[str] = []
        for name in self.mesh.services:
            lines.append(f"--- {name}: {self.mesh.health(name)}")
            lines.append(self.mesh.children[name].last_log(6))
        return "\n".join(lines)

    async def _read_on(self) -> None:
        after = self._tape[-1].sequence + 1 if self._tape else 1
        news = await self.watch.stream("EVENTS", after)
        self._tape += news
        self.recount.take_all(news)
        after = self._requests[-1].sequence + 1 if self._requests else 1
        self._requests += [
            Submitted(m.sequence, m.stored_ns, m.subject, m.payload)
            for m in await self.watch.stream("REQUESTS", after)
        ]

    def _undecided(self) -> list[int]:
        tenants = set(self.mesh.config["tenants"])
        decided = _decided(self.recount.decisions, self._requests)
        return [
            message.sequence
            for message in self._requests
            if message.tenant in tenants and message.sequence not in decided
        ]

    def _public(self) -> dict[str, bytes]:
        """What anybody may read who looks after the mesh: everything but the bus's own store."""
        mesh = self.mesh
        found: dict[str, bytes] = {}
        for name in mesh.services:
            for path in ("/metrics", "/healthz"):
                found[f"{name}{path}"] = mesh.fetch(name, path)[1]
        for folder in ("logs", "admission", "scheduler", "ledger", *mesh.workers):
            for file in sorted((mesh.data_dir / folder).rglob("*")):
                if file.is_file() and file.name != "writer-key":
                    found[str(file.relative_to(mesh.data_dir))] = file.read_bytes()
        return found

    def _secrets(self) -> dict[str, str]:
        access = self.mesh.access
        secrets = {f"prompt word {mark!r}": mark for mark in self._marks}
        secrets |= {f"password of {name}": text for name, text in access.services.items()}
        for name, tenant in access.tenants.items():
            secrets |= {f"password of {name}": tenant.password, f"key of {name}": tenant.api_key}
        return secrets | {"mesh key": access.mesh_key}


def claim_of(handle: Handle, tenant: str) -> Claim:
    """What a handle of the producer library holds now."""
    shown: str | None = None
    if handle.pieces:
        shown = ""
        for piece in handle.pieces:
            shown = "" if isinstance(piece, Restarted) else shown + piece.text
    return Claim(
        tenant=tenant,
        id=handle.id,
        body=handle.body,
        receipts=handle.receipts,
        final=handle.final,
        shown=shown,
        error="" if handle.error is None else repr(handle.error),
    )


def report_of(evidence: Evidence) -> Report:
    recount = evidence.recount
    requests = recount.requests.values()
    measures = [measure(request) for request in requests]
    return Report(
        events=len(evidence.tape),
        submissions=len(evidence.requests),
        requests=len(recount.requests),
        outcomes=dict(recount.outcomes()),
        reasons=dict(recount.reasons()),
        lost_attempts=sum(len(request.lost) for request in requests),
        superseded=sum(len(request.superseded) for request in requests),
        repeated=recount.repeated,
        fenced=recount.fenced,
        flagged=sum(m is not None and min(m.segments.values()) < 0 for m in measures),
        elections={name: len(won) for name, won in recount.elections.items()},
        busy_max=dict(recount.busy_max),
        recount=recount,
    )


# --- judging


def find_faults(evidence: Evidence) -> list[str]:
    """Everything that must not be, in words. Pure but for reading the ledger's folder."""
    found: list[str] = []
    for judge in (
        _judge_tape,
        _judge_leaves,
        _judge_record,
        _judge_decisions,
        _judge_ends,
        _judge_lives,
        _judge_receipts,
        _judge_finals,
        _judge_claims,
        _judge_clocks,
        _judge_secrets,
        _judge_logs,
    ):
        faults = list(judge(evidence))
        found += faults[:NAMED_MAX]
        if len(faults) > NAMED_MAX:
            found.append(f"… and {len(faults) - NAMED_MAX} more like the last")
    return found


def find_after_stop(folder: Path) -> Iterator[str]:
    """With nothing running: the record answers, twice with the same bytes, and nothing is left.

    Once in this process and once in a fresh one with another hash seed and another zone, so that
    no order of a set and no local time can hide.
    """
    for pid, line in processes_of(folder).items():
        yield f"left running: process {pid}: {line}"
    clocks: tuple[tuple[Literal["queue", "exec"], str], ...]
    clocks = (("queue", "UTC"), ("exec", "Asia/Shanghai"))
    for clock, zone in clocks:
        here = io.StringIO()
        status = run_replay(
            folder,
            clock=clock,
            tenant=None,
            since=None,
            request=None,
            as_json=True,
            verify=False,
            out=here,
        )
        command = ["replay", "--data", str(folder), "--clock", clock, "--json"]
        there = subprocess.run(
            [sys.executable, "-m", "waterclock", *command],
            env={**os.environ, "PYTHONHASHSEED": "7", "TZ": zone},
            capture_output=True,
            check=False,
            timeout=50,
        )
        if status != 0 or there.returncode != 0:
            yield f"replay: status {status} and {there.returncode}: {there.stderr.decode()[-400:]}"
        if here.getvalue().encode() != there.stdout:
            yield f"replay: --clock {clock} makes other bytes in another process"


def _judge_tape(evidence: Evidence) -> Iterator[str]:
    tape = evidence.tape
    if tape and tape[0].sequence != 1:
        yield f"tape: begins at {tape[0].sequence}, expected 1"
    yield from evidence.recount.faults
    for stored in tape:
        if not stored.subject.startswith("wc.event."):
            yield f"tape: {stored.sequence} is on {stored.subject}"


def _judge_leaves(evidence: Evidence) -> Iterator[str]:
    leaves = read_leaves(evidence.ledger)
    for stored in evidence.tape:
        try:
            leaf = next(leaves, None)
        except ValueError as error:
            yield f"leaves: {error}"
            return
        if leaf is None:
            yield f"leaves: none for sequence {stored.sequence}"
            return
        if leaf != stored:
            what = [
                name
                for name in stored.__struct_fields__
                if getattr(leaf, name) != getattr(stored, name)
            ]
            yield (
                f"leaves: at sequence {stored.sequence} the record has another"
                f" {' and '.join(what)} than the tape (leaf of sequence {leaf.sequence})"
            )
            if "sequence" in what:
                return


def _judge_record(evidence: Evidence) -> Iterator[str]:
    found = ledger_check.check(evidence.ledger)
    yield from (f"record: {violation}" for violation in found.violations)
    yield from (f"record: {name} has not ended" for name in found.open)


def _judge_decisions(evidence: Evidence) -> Iterator[str]:
    recount = evidence.recount
    by_sequence = {message.sequence: message for message in evidence.requests}
    decided = _decided(recount.decisions, evidence.requests)
    for message in evidence.requests:
        if message.tenant not in evidence.tenants:
            continue
        by = decided.get(message.sequence, [])
        if len(by) != 1:
            at = [decision.sequence for decision in by]
            yield (
                f"decisions: submission {message.sequence} of {message.tenant} is decided"
                f" {len(by)} times, at {at}"
            )
    for decision in recount.decisions:
        message = by_sequence.get(decision.first)
        if message is None:
            yield f"decisions: {decision.sequence} decides {decision.first}, which is not there"
        elif message.tenant != decision.tenant:
            yield (
                f"decisions: {decision.sequence} of {decision.tenant} decides {decision.first},"
                f" which is {message.tenant}'s"
            )
    counted = Counter(at.sequence for by in decided.values() for at in by)
    for decision in recount.decisions:
        if counted[decision.sequence] != decision.count and decision.tenant in evidence.tenants:
            yield (
                f"decisions: {decision.sequence} stands for {decision.count} submissions,"
                f" {counted[decision.sequence]} found between {decision.first} and {decision.last}"
            )
    yield from _judge_numbers(recount.decisions)


def _judge_numbers(decisions: list[Decision]) -> Iterator[str]:
    runs: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for decision in decisions:
        last = decision.number + decision.count - 1
        runs[decision.tenant].append((decision.number, last, decision.sequence))
    for tenant, numbers in runs.items():
        expected = 1
        for first, last, sequence in sorted(numbers):
            if first != expected:
                yield (f"numbers: {tenant} {expected} expected, {first} found at {sequence}")
            expected = last + 1


def _decided(decisions: list[Decision], requests: list[Submitted]) -> dict[int, list[Decision]]:
    """By submission: the events that decide it.

    An event that stands for several submissions names the first and the last of them, and steps
    over those of its tenant in between that an event of their own decides.
    """
    decided: dict[int, list[Decision]] = defaultdict(list)
    folded: list[Decision] = []
    for decision in decisions:
        if decision.count == 1 and decision.first == decision.last:
            decided[decision.first].append(decision)
        else:
            folded.append(decision)
    if not folded:
        return decided
    of_tenant: dict[str, list[int]] = defaultdict(list)
    for message in requests:
        of_tenant[message.tenant].append(message.sequence)
    for decision in folded:
        for sequence in of_tenant[decision.tenant]:
            if not decision.first <= sequence <= decision.last:
                continue
            ends = sequence in (decision.first, decision.last)
            if ends or not any(other.count == 1 for other in decided.get(sequence, ())):
                decided[sequence].append(decision)
    return decided


def _judge_ends(evidence: Evidence) -> Iterator[str]:
    for request in evidence.recount.requests.values():
        name = f"{request.tenant}/{request.id}"
        if request.end is None:
            yield f"ends: {name} was admitted at {request.sequence} and has none"
            continue
        if request.end_kind == "completed":
            attempt = int(request.end["attempt"])
            if attempt not in request.started:
                yield f"ends: {name} completed attempt {attempt}, which never started"
            if request.end.get("output_tokens", 0) > request.admitted["output_tokens_max"]:
                yield f"ends: {name} made more tokens than it was admitted for"


def _judge_lives(evidence: Evidence) -> Iterator[str]:
    """Nothing is given to a life that was declared lost, unless it was heard again."""
    for given_ns, life, lost_ns, why in evidence.recount.dispatches:
        if not lost_ns:
            continue
        if why != "lease":
            yield f"lives: {life} was given work after it was lost ({why})"
            continue
        heard = any(
            heard_ns > lost_ns - BEAT_NS and sent_ns <= given_ns
            for heard_ns, sent_ns in evidence.beats.get(life, ())
        )
        deaf = any(lost_ns - BREAK_NS < broke < lost_ns + BREAK_NS for broke in evidence.breaks)
        if not heard and not deaf:
            yield f"lives: {life} was given work after its lease ran out, and was not heard since"


def _judge_receipts(evidence: Evidence) -> Iterator[str]:
    tape = {stored.sequence: stored for stored in evidence.tape}
    bodies = {message.sequence: message.body for message in evidence.requests}
    seen: set[bytes] = set()
    for said in evidence.receipts:
        if said.payload in seen:
            continue
        seen.add(said.payload)
        try:
            receipt = msgspec.json.decode(said.payload)
            yield from _judge_receipt(receipt, tape, bodies, evidence.incarnation)
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            yield f"receipts: {said.subject} is none: {error!r}"
    for claim in evidence.claims:
        for held in claim.receipts:
            encoded = msgspec.json.encode(held)
            if encoded in seen:
                continue
            seen.add(encoded)
            yield from _judge_receipt(
                msgspec.json.decode(encoded), tape, bodies, evidence.incarnation
            )


def _judge_receipt(
    receipt: dict[str, Any], tape: dict[int, Stored], bodies: dict[int, bytes], incarnation: str
) -> Iterator[str]:
    name = f"receipts: {receipt['tenant']}/{receipt.get('id', '')} at {receipt['sequence']}"
    stored = tape.get(receipt["sequence"])
    if stored is None or stored.payload != receipt["event"].encode():
        yield f"{name}: its event does not stand on the tape there"
        return
    event = msgspec.json.decode(stored.payload)
    data = event["data"]
    if stored.stored_ns != receipt["stored_ns"]:
        yield f"{name}: stored at {stored.stored_ns}, and it says {receipt['stored_ns']}"
    if receipt["incarnation"] != incarnation:
        yield f"{name}: incarnation {incarnation} expected, {receipt['incarnation']} found"
    if event["type"] != f"waterclock.{receipt['outcome']}.v1":
        yield f"{name}: says {receipt['outcome']} of an event of type {event['type']}"
    for field in ("tenant", "number", "reason", "retry_after_ms"):
        if receipt.get(field) != data.get(field):
            yield f"{name}: {field} {data.get(field)!r} expected, {receipt.get(field)!r} found"
    if receipt.get("id", "") != data.get("id", ""):
        yield f"{name}: is about {data.get('id')!r}"
    last = data.get("requests_sequence_last") or data["requests_sequence"]
    if not data["requests_sequence"] <= receipt["requests_sequence"] <= last:
        yield f"{name}: names submission {receipt['requests_sequence']}, its event does not"
    if receipt["outcome"] == "admitted":
        body = bodies.get(receipt["requests_sequence"])
        if body is None:
            yield f"{name}: its submission is not there"
        elif not _commits(receipt.get("salt", ""), body, data["body_commitment"]):
            yield f"{name}: its salt does not prove the body"


def _commits(salt: str, body: bytes, commitment: str) -> bool:
    """HMAC-SHA-256 (RFC 2104) of the body under the salt, 32 bytes, against the commitment."""
    key = bytes.fromhex(salt)
    return len(key) == 32 and hmac.new(key, body, hashlib.sha256).hexdigest() == commitment


def _judge_finals(evidence: Evidence) -> Iterator[str]:
    recount = evidence.recount
    sent: dict[Key, set[bytes]] = defaultdict(set)
    for key, payloads in evidence.finals.items():
        sent[key] |= set(payloads)
    for stored in evidence.answers:
        _, _, tenant, request_id = stored.subject.split(".")
        sent[tenant, request_id].add(stored.payload)
        request = recount.requests.get((tenant, request_id))
        if request is not None and stored.stored_ns < request.end_ns:
            yield f"finals: {tenant}/{request_id} was answered before its end was on the tape"
    for key, payloads in sent.items():
        name = f"finals: {key[0]}/{key[1]}"
        request = recount.requests.get(key)
        if request is None:
            yield f"{name}: was never admitted"
            continue
        if len(payloads) > 1:
            yield f"{name}: {len(payloads)} different ones were sent"
        for payload in payloads:
            yield from _judge_final(name, msgspec.json.decode(payload), request)
    for key, request in recount.requests.items():
        if request.end is not None and key not in sent:
            worker = str(request.end.get("worker", "")).rpartition("-")[0]
            if worker not in evidence.killed:
                yield f"finals: {key[0]}/{key[1]}: none was sent, and its worker was never killed"


def _judge_final(name: str, final: dict[str, Any], request: Request) -> Iterator[str]:
    end = request.end
    if end is None:
        yield f"{name}: sent without an end on the tape"
        return
    if final["outcome"] != request.end_kind:
        yield f"{name}: says {final['outcome']}, the tape says {request.end_kind}"
        return
    if not final.get("answer_kept", True):
        # Only the outcome is known any more, and the answer says so.
        if final.get("text"):
            yield f"{name}: has a text, and says that it has none"
        return
    attempt = int(end.get("attempt", 0))
    if final.get("attempt", 0) != attempt:
        yield f"{name}: of attempt {final.get('attempt', 0)}, the end that counts is of {attempt}"
    if request.end_kind == "rejected":
        if final.get("reject_reason") != end["reason"]:
            yield f"{name}: refused for {final.get('reject_reason')}, on the tape {end['reason']}"
        return
    usage = final.get("usage", {})
    for field, named in (
        ("prompt_tokens", "prompt_tokens"),
        ("output_tokens", "completion_tokens"),
        ("cached_tokens", "cached_tokens"),
    ):
        if usage.get(named, 0) != end.get(field, 0):
            yield f"{name}: {named} {end.get(field, 0)} expected, {usage.get(named, 0)} found"
    if final.get("model_served", "") != end.get("model_served", ""):
        yield f"{name}: served by {end.get('model_served')}, it says {final.get('model_served')}"
    if final.get("finish_reason") != end.get("finish_reason"):
        yield f"{name}: finish {end.get('finish_reason')}, it says {final.get('finish_reason')}"
    timings = final.get("timings")
    if timings is not None and sum(timings["segments"].values()) != timings["total_us"]:
        yield f"{name}: its segments do not sum to its total"


def _judge_claims(evidence: Evidence) -> Iterator[str]:
    recount = evidence.recount
    kept = {
        (claim.tenant, claim.id): _kept(evidence, (claim.tenant, claim.id))
        for claim in evidence.claims
    }
    for claim in evidence.claims:
        name = f"claims: {claim.tenant}/{claim.id}"
        if claim.error:
            yield f"{name}: the producer gave up: {claim.error}"
            continue
        if claim.final is None:
            yield f"{name}: the producer has no final"
            continue
        request = recount.requests.get((claim.tenant, claim.id))
        if request is None or (
            claim.final.outcome == "rejected" and _refused_at_the_door(claim, request)
        ):
            if claim.final.outcome != "rejected":
                yield f"{name}: {claim.final.outcome}, and it was never admitted"
            continue
        final = msgspec.to_builtins(claim.final)
        yield from _judge_final(name, final, request)
        if claim.final.answer_kept and claim.shown is not None:
            whole = request.end_kind == "completed"
            if whole and claim.shown != claim.final.text:
                yield f"{name}: what was streamed does not join to the final's text"
        worker = str((request.end or {}).get("worker", "")).rpartition("-")[0]
        if not claim.final.answer_kept and worker not in evidence.killed:
            there = kept[claim.tenant, claim.id]
            yield (
                f"{name}: told that its answer is not kept, though its worker was never killed"
                f" ({'it is kept' if there else 'nor is it'})"
            )


def _refused_at_the_door(claim: Claim, request: Request) -> bool:
    """Whether this claim's own submission was refused, though another of its id was admitted."""
    return request.end_kind != "rejected" and any(
        receipt.outcome == "rejected" for receipt in claim.receipts
    )


def _kept(evidence: Evidence, key: Key) -> bool:
    subject = f"wc.final.{key[0]}.{key[1]}"
    return any(stored.subject == subject for stored in evidence.answers)


def _judge_clocks(evidence: Evidence) -> Iterator[str]:
    try:
        tapes = read_record(evidence.ledger).tapes
    except (LogDamaged, LogMissing) as error:
        yield f"clocks: the record cannot be read: {error}"
        return
    summaries = {
        (summary.tenant, summary.id): summary for tape in tapes for summary in tape.summaries()
    }
    for key, request in evidence.recount.requests.items():
        mine = measure(request)
        if mine is None:
            continue
        name = f"clocks: {key[0]}/{key[1]}"
        theirs = summaries.get(key)
        if theirs is None:
            yield f"{name}: the record does not know it"
            continue
        if sum(mine.segments.values()) != mine.total_us:
            yield f"{name}: segments sum to {sum(mine.segments.values())}, total {mine.total_us}"
        if (theirs.segments, theirs.total_us, theirs.exec_us) != (
            mine.segments,
            mine.total_us,
            mine.exec_us,
        ):
            yield (
                f"{name}: counted again {mine.segments} of {mine.total_us}, exec {mine.exec_us};"
                f" the record says {theirs.segments} of {theirs.total_us}, exec {theirs.exec_us}"
            )
        if theirs.outcome != request.outcome:
            yield f"{name}: {request.outcome} on the tape, {theirs.outcome} in the record"
        negative = {segment for segment, us in mine.segments.items() if us < 0}
        flagged = {flag.partition(":")[2] for flag in theirs.flags if flag.startswith("negative:")}
        if negative != flagged:
            yield f"{name}: negative are {sorted(negative)}, flagged are {sorted(flagged)}"
        if mine.exec_us is not None and mine.exec_us > mine.total_us and not negative:
            yield f"{name}: execution clock {mine.exec_us} above queue clock {mine.total_us}"


def _judge_secrets(evidence: Evidence) -> Iterator[str]:
    wanted = dict(evidence.secrets)
    texts = sorted(
        {
            text
            for payloads in evidence.finals.values()
            for payload in payloads
            if len(text := str(msgspec.json.decode(payload).get("text", ""))) >= 2 * SNIPPET
        }
    )
    for text in random.Random(len(texts)).sample(texts, min(ANSWERS_SEARCHED, len(texts))):
        middle = len(text) // 2
        wanted[f"answer {text[:8]!r}…"] = text[:SNIPPET]
        wanted[f"answer …{text[middle : middle + 8]!r}…"] = text[middle : middle + SNIPPET]
    places = {f"file {name}": content for name, content in evidence.public.items()}
    places["tape"] = b"\n".join(stored.payload for stored in evidence.tape)
    for what, text in wanted.items():
        # As it is, and as JSON writes it where it keeps to ASCII.
        forms = {text.encode(), msgspec.json.encode(text)[1:-1], ascii(text)[1:-1].encode()}
        for place, content in places.items():
            if any(form in content for form in forms):
                yield f"secrets: {what} stands in {place}"


def _judge_logs(evidence: Evidence) -> Iterator[str]:
    """What a service expects to go wrong has a name; a traceback is a bug that nobody saw."""
    for name, content in evidence.public.items():
        if not name.startswith("logs/") or name in ("logs/nats.log", "logs/valkey.log"):
            continue
        for line in content.splitlines():
            if b"Traceback (most recent call last)" in line or b'"exception"' in line:
                yield f"logs: {name}: {line.decode(errors='replace')[:300]}"


# --- reading


def read_leaves(ledger: Path) -> Iterator[Stored]:
    """The leaves of a ledger's folder by the layout that is written down, without its code.

    A leaf is framed by its length (2 bytes); it is 1 byte of kind, 8 of sequence, 8 of stamp in
    nanoseconds, 2 of subject length, the subject, the payload; integers are big-endian.

    Raises:
        ValueError: bytes that this layout does not explain.
    """
    folders = [folder for folder in (ledger / "log").iterdir() if (folder / "log.json").exists()]
    folders.sort(
        key=lambda folder: msgspec.json.decode((folder / "log.json").read_bytes())["ordinal"]
    )
    for folder in folders:
        for file in sorted(folder.glob("leaves-*.bin")):
            content = file.read_bytes()
            at = 0
            while at < len(content):
                size = int.from_bytes(content[at : at + 2])
                leaf = content[at + 2 : at + 2 + size]
                if len(leaf) < size:
                    # The ledger is writing it at this moment, or a crash cut it off.
                    return
                if size < 19 or leaf[0] != 1:
                    raise ValueError(f"{file.name} at byte {at}: kind {leaf[:1].hex()} expected 01")
                subject_bytes = int.from_bytes(leaf[17:19])
                try:
                    subject = leaf[19 : 19 + subject_bytes].decode()
                except UnicodeDecodeError as error:
                    raise ValueError(f"{file.name} at byte {at}: subject: {error}") from error
                yield Stored(
                    int.from_bytes(leaf[1:9]),
                    int.from_bytes(leaf[9:17]),
                    subject,
                    leaf[19 + subject_bytes :],
                )
                at += 2 + size


def _incarnation(tape: list[Stored]) -> str:
    for stored in reversed(tape):
        if stored.subject == "wc.event.log_opened._._":
            return str(msgspec.json.decode(stored.payload)["data"]["incarnation"])
    return ""


async def _all_ended(handles: Sequence[Handle], wait_s: float) -> None:
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + wait_s
    while loop.time() < give_up_s and not all(handle.ended for handle in handles):  # noqa: ASYNC110 - many ends, one wait
        await asyncio.sleep(0.05)
