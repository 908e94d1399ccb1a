"""One example of everything that crosses a wire or is kept, and its exact bytes.

``python -m waterclock_proto.golden`` writes the bytes that are missing under ``proto/golden/``. A
file that is there is never written again: it says what version 1 looks like for good, and what
today's encoder makes must equal it. A changed meaning is a new version with a file of its own.

The events tell one request's story, and each fills every field that its type has.
"""

import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from waterclock_proto import events, requests
from waterclock_proto.envelope import Chain
from waterclock_proto.events import EventData
from waterclock_proto.leaves import Leaf, encode_leaf
from waterclock_proto.stamps import Source, Stamp

FOLDER = Path(__file__).resolve().parents[1] / "golden"

_START_US = 1_767_323_045_000_000
_BOOT = "5be2f0c94a1d7e38"
_OTHER_BOOT = "c07a93d1be6650f2"
_TENANT = "acme"
_ID = "r-1001"
_LIFE = "gpu3-9f21c4"
_SHA256 = "9c56cc51b374c3ba189210d5b6d4bf57790d351c96c47c02190ecf1e430635ab"


def _stamp(after_us: int, source: Source, boot: str = _BOOT) -> Stamp:
    return Stamp(
        wall_us=_START_US + after_us,
        source=source,
        boot=boot,
        mono_ns=86_400_000_000_000 + after_us * 1000,
        error_us=250,
    )


_ARRIVAL = Stamp(wall_us=_START_US, source="bus")
_EDGE = _stamp(-900, "edge")
_RECEIVED = _stamp(400, "admission")
_DECIDED = _stamp(550, "admission")
_DISPATCHED = _stamp(12_000, "scheduler")
_SUBMITTED = _stamp(12_800, "worker", _OTHER_BOOT)
_QUEUED = _stamp(12_900, "engine", _OTHER_BOOT)
_SCHEDULED = _stamp(15_000, "engine", _OTHER_BOOT)
_FIRST_TOKEN = _stamp(61_000, "engine", _OTHER_BOOT)
_LAST_TOKEN = _stamp(890_000, "engine", _OTHER_BOOT)
_ENDED = _stamp(891_000, "worker", _OTHER_BOOT)

EVENTS: tuple[EventData, ...] = (
    events.Admitted(
        tenant=_TENANT,
        id=_ID,
        tier="gold",
        requests_sequence=4711,
        number=312,
        contract_sha256=_SHA256,
        model="sim-8b",
        stream=True,
        arrival=_ARRIVAL,
        edge_accepted=_EDGE,
        received=_RECEIVED,
        decided=_DECIDED,
        sent_us=_START_US - 1200,
        deadline_us=_START_US + 30_000_000,
        body_bytes=213,
        prompt_tokens_estimate=42,
        output_tokens_max=256,
        body_commitment=_SHA256,
        language_hint="zh",
        session_fingerprint="2f0d9b7c5a3e1f48",
    ),
    events.Rejected(
        tenant=_TENANT,
        id=_ID,
        requests_sequence=4711,
        requests_sequence_last=4713,
        number=312,
        count=3,
        reason="malformed",
        detail="JSON is malformed: invalid character (byte 21)",
        retry_after_ms=1500,
        tier="gold",
        pool="zh",
        arrival=_ARRIVAL,
        edge_accepted=_EDGE,
        decided=_DECIDED,
    ),
    events.Resubmitted(
        tenant=_TENANT,
        id=_ID,
        requests_sequence=4800,
        number=330,
        first_requests_sequence=4711,
        outcome="completed",
        arrival=_ARRIVAL,
        decided=_DECIDED,
    ),
    events.CancelRequested(tenant=_TENANT, id=_ID, reason="producer", requested=_RECEIVED),
    events.Enqueued(
        tenant=_TENANT,
        id=_ID,
        pool="zh",
        language="zh",
        language_reason="script",
        language_permille=980,
        prompt_tokens=42,
        output_tokens_predicted=120,
        service_predicted_us=900_000,
        predictor="median-1",
        enqueued=_stamp(700, "scheduler"),
    ),
    events.Dispatched(
        tenant=_TENANT,
        id=_ID,
        attempt=1,
        worker=_LIFE,
        pool="zh",
        policy="sjf",
        place=2,
        depth=9,
        requests_sequence=4711,
        body_commitment=_SHA256,
        model="sim-8b",
        tier="gold",
        stream=True,
        output_tokens_max=256,
        deadline_us=_START_US + 30_000_000,
        arrival=_ARRIVAL,
        edge_accepted=_EDGE,
        received=_RECEIVED,
        decided=_DECIDED,
        dispatched=_DISPATCHED,
    ),
    events.Started(
        tenant=_TENANT,
        id=_ID,
        attempt=1,
        worker=_LIFE,
        taken=_stamp(12_400, "worker", _OTHER_BOOT),
        submitted=_SUBMITTED,
    ),
    events.FirstToken(
        tenant=_TENANT,
        id=_ID,
        attempt=1,
        worker=_LIFE,
        queued=_QUEUED,
        scheduled=_SCHEDULED,
        scheduled_not_before=_QUEUED,
        scheduled_not_after=_FIRST_TOKEN,
        first_token=_FIRST_TOKEN,
    ),
    events.Completed(
        tenant=_TENANT,
        id=_ID,
        attempt=1,
        worker=_LIFE,
        prompt_tokens=41,
        output_tokens=118,
        cached_tokens=16,
        preemptions=1,
        model_served="sim-8b",
        submitted=_SUBMITTED,
        queued=_QUEUED,
        scheduled=_SCHEDULED,
        first_token=_FIRST_TOKEN,
        last_token=_LAST_TOKEN,
        ended=_ENDED,
        finish_reason="stop",
    ),
    events.Failed(
        tenant=_TENANT,
        id=_ID,
        attempt=1,
        worker=_LIFE,
        prompt_tokens=41,
        output_tokens=17,
        cached_tokens=16,
        preemptions=1,
        model_served="sim-8b",
        submitted=_SUBMITTED,
        queued=_QUEUED,
        scheduled=_SCHEDULED,
        first_token=_FIRST_TOKEN,
        last_token=_LAST_TOKEN,
        ended=_ENDED,
        reason="engine_error",
        detail="the engine ended with exit code 139",
    ),
    events.Cancelled(
        tenant=_TENANT,
        id=_ID,
        attempt=1,
        worker=_LIFE,
        prompt_tokens=41,
        output_tokens=17,
        cached_tokens=16,
        preemptions=1,
        model_served="sim-8b",
        submitted=_SUBMITTED,
        queued=_QUEUED,
        scheduled=_SCHEDULED,
        first_token=_FIRST_TOKEN,
        last_token=_LAST_TOKEN,
        ended=_ENDED,
        phase="running",
    ),
    events.Expired(
        tenant=_TENANT,
        id=_ID,
        attempt=1,
        worker=_LIFE,
        prompt_tokens=41,
        output_tokens=17,
        cached_tokens=16,
        preemptions=1,
        model_served="sim-8b",
        submitted=_SUBMITTED,
        queued=_QUEUED,
        scheduled=_SCHEDULED,
        first_token=_FIRST_TOKEN,
        last_token=_LAST_TOKEN,
        ended=_ENDED,
        phase="running",
    ),
    events.AttemptLost(
        tenant=_TENANT,
        id=_ID,
        attempt=1,
        worker=_LIFE,
        pool="zh",
        reason="lease",
        lost=_stamp(1_400_000, "scheduler"),
    ),
    events.RungChanged(
        pool="zh",
        rung_from=1,
        rung_to=3,
        actions=("batch_cap", "speculation_off", "refuse"),
        batch_cap=8,
        retry_after_ms=2500,
        depth=144,
        workers=2,
        in_flight=16,
        changed=_stamp(2_000_000, "scheduler"),
    ),
    events.PoolDegraded(
        pool="zh", to_pool="default", reason="no_workers", changed=_stamp(2_000_000, "scheduler")
    ),
    events.SchedulerElected(elected=_stamp(-60_000_000, "scheduler")),
    events.AdmissionElected(elected=_stamp(-60_000_000, "admission")),
    events.Delivered(
        tenant=_TENANT,
        id=_ID,
        sent_us=_START_US - 1200,
        receipt_us=_START_US + 2100,
        first_token_us=_START_US + 63_000,
        last_token_us=_START_US + 893_000,
        quoted=_stamp(900_000, "admission"),
    ),
    events.ContractActivated(
        tenant=_TENANT,
        contract_sha256=_SHA256,
        valid_from_us=_START_US,
        valid_to_us=_START_US + 86_400_000_000,
        activated=_stamp(-1_000_000, "admission"),
    ),
    events.ClockReported(
        service="worker",
        boot=_BOOT,
        samples=16,
        offset_us_min=-310,
        offset_us_max=180,
        reported=_stamp(5_000_000, "worker"),
    ),
    events.WriterSealed(
        sealed_counter=6,
        head_sha256=_SHA256,
        algorithm="ed25519",
        signature="5a" * 64,
        last=True,
        sealed=_stamp(6_000_000, "ledger"),
    ),
    events.WindowClosed(
        tenant=_TENANT,
        start_us=_START_US,
        end_us=_START_US + 60_000_000,
        number_first=301,
        number_last=340,
        admitted=36,
        rejected=3,
        resubmitted=1,
        closed=_stamp(61_000_000, "admission"),
    ),
    events.LogOpened(
        incarnation="i-20260102",
        first_sequence=1,
        reason="rolled_back",
        previous_incarnation="i-20251224",
        previous_size=991_204,
        opened=_stamp(-61_000_000, "ledger"),
    ),
)
"""Each type of event once, with every field set."""

_SERVICES = {
    "started": "worker",
    "first_token": "worker",
    "completed": "worker",
    "failed": "worker",
    "cancelled": "worker",
    "expired": "worker",
    "clock_reported": "worker",
    "enqueued": "scheduler",
    "dispatched": "scheduler",
    "attempt_lost": "scheduler",
    "rung_changed": "scheduler",
    "pool_degraded": "scheduler",
    "scheduler_elected": "scheduler",
    "writer_sealed": "ledger",
    "log_opened": "ledger",
}


def sealed(data: EventData) -> tuple[str, bytes]:
    """Subject and payload of an example, as the seventh event of a writer of its own."""
    service = _SERVICES.get(data.TYPE, "admission")
    chain = Chain(service=service, writer=f"{service}-3c9a41", key=b"golden")
    chain.counter = 7
    chain.head = _SHA256
    chain.fence = 3 if service in ("admission", "scheduler") else 0
    chain.incarnation = "i-20260102"
    return chain.seal(data)


_ANSWERED = requests.Timings(
    arrival_us=_START_US,
    queue_us=15_000,
    exec_us=876_000,
    total_us=891_000,
    segments={
        "bus": 400,
        "admission": 150,
        "queue": 11_450,
        "dispatch": 800,
        "engine_wait": 2200,
        "prefill": 46_000,
        "decode": 829_000,
        "delivery": 1000,
    },
)

MESSAGES: dict[str, Struct] = {
    "submission": requests.Submission(
        id=_ID,
        model="sim-8b",
        messages=(
            requests.ChatMessage(role="system", content="Answer in one sentence."),
            requests.ChatMessage(role="user", content="水钟是怎么计时的？"),
        ),
        max_tokens=256,
        stream=True,
        deadline_ms=30_000,
        deadline_us=_START_US + 30_000_000,
        language="zh",
        session="conversation 17",
        sampling=requests.Sampling(temperature="0.7", top_p="0.95", seed=7, stop=("\n\n", "END")),
        sent_us=_START_US - 1200,
    ),
    "submission_prompt": requests.Submission(
        id=_ID, prompt="How does a water clock tell time?", max_tokens=64, ignore_eos=True
    ),
    "submission_resume": requests.Submission(id=_ID, resume=True),
    "receipt": requests.Receipt(
        tenant=_TENANT,
        id=_ID,
        outcome="admitted",
        requests_sequence=4711,
        number=312,
        event=sealed(EVENTS[0])[1].decode(),
        incarnation="i-20260102",
        sequence=90_211,
        stored_ns=(_START_US + 900) * 1000 + 123,
        salt="1c" * 32,
    ),
    "receipt_rejected": requests.Receipt(
        tenant=_TENANT,
        id="",
        outcome="rejected",
        requests_sequence=4713,
        number=314,
        event=sealed(EVENTS[1])[1].decode(),
        incarnation="i-20260102",
        sequence=90_214,
        stored_ns=(_START_US + 1900) * 1000 + 7,
        reason="malformed",
        detail="JSON is malformed: invalid character (byte 21)",
        retry_after_ms=1500,
    ),
    "receipt_resubmitted": requests.Receipt(
        tenant=_TENANT,
        id=_ID,
        outcome="resubmitted",
        requests_sequence=4800,
        number=330,
        event=sealed(EVENTS[2])[1].decode(),
        incarnation="i-20260102",
        sequence=90_377,
        stored_ns=(_START_US + 2_000_000) * 1000,
        salt="1c" * 32,
        resubmitted_outcome="completed",
    ),
    "delta": requests.Delta(id=_ID, attempt=1, index=0, text="水从", tokens=2, queue_us=15_000),
    "restarted": requests.Restarted(id=_ID, attempt=2),
    "final": requests.Final(
        tenant=_TENANT,
        id=_ID,
        attempt=1,
        outcome="completed",
        finish_reason="stop",
        text="水从一个容器匀速流入另一个。",
        model_served="sim-8b",
        usage=requests.Usage(prompt_tokens=41, completion_tokens=118, cached_tokens=16),
        timings=_ANSWERED,
    ),
    "final_failed": requests.Final(
        tenant=_TENANT,
        id=_ID,
        attempt=2,
        outcome="failed",
        fail_reason="engine_error",
        detail="the engine ended with exit code 139",
        model_served="sim-8b",
        usage=requests.Usage(prompt_tokens=41),
        timings=requests.Timings(arrival_us=_START_US, total_us=891_000),
    ),
    "final_rejected": requests.Final(
        tenant=_TENANT,
        id=_ID,
        outcome="rejected",
        reject_reason="load_shed",
        retry_after_ms=2500,
        detail="pool zh stands on a rung that refuses",
    ),
    "final_gone": requests.Final(
        tenant=_TENANT, id=_ID, attempt=1, outcome="completed", answer_kept=False
    ),
    "delivered_claim": requests.DeliveredClaim(
        id=_ID,
        sent_us=_START_US - 1200,
        receipt_us=_START_US + 2100,
        first_token_us=_START_US + 63_000,
        last_token_us=_START_US + 893_000,
    ),
    "beat": requests.Beat(
        worker=_LIFE,
        name="gpu3",
        pool="zh",
        models=("sim-8b", "sim-1b"),
        slots=16,
        draining=True,
        in_flight=5,
        beat=_stamp(250_000, "worker", _OTHER_BOOT),
    ),
    "edge_accepted": _EDGE,
}
"""Each type of message, in as many examples as it has faces; together they set every field."""

LEAVES: dict[str, Leaf] = {
    "leaf_event": Leaf(
        sequence=90_211,
        stored_ns=_START_US * 1000 + 123,
        subject="wc.event.scheduler_elected._._",
        payload=sealed(EVENTS[15])[1],
    ),
    "leaf_hole": Leaf(sequence=90_212, hole=True),
}


def golden_files() -> dict[str, bytes]:
    """The bytes of every example by the name of its file."""
    files = {f"{data.TYPE}.v1.json": sealed(data)[1] for data in EVENTS}
    files |= {f"{name}.v1.json": msgspec.json.encode(message) for name, message in MESSAGES.items()}
    files |= {
        f"{name}.v1.hex": encode_leaf(leaf).hex().encode() + b"\n" for name, leaf in LEAVES.items()
    }
    return files


def write_missing(folder: Path) -> list[str]:
    """Add the files that are not there; return their names."""
    missing = {
        name: content for name, content in golden_files().items() if not (folder / name).exists()
    }
    folder.mkdir(exist_ok=True)
    for name, content in missing.items():
        (folder / name).write_bytes(content)
    return sorted(missing)


if __name__ == "__main__":
    sys.stdout.writelines(f"added {name}\n" for name in write_missing(FOLDER))
