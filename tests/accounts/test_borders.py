"""The borders between tenants and the mesh, tried from outside against a real bus server.

Every attack ends in the same question: what was heard inside the mesh, and what is stored there?
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from waterclock_proto.accounts import TenantSecret, server_config
from waterclock_proto.flows import CHANNELS, EVENT_FLOWS, SERVICES, Service, wildcards
from waterclock_proto.subjects import CROSSINGS, STREAMS, event_filter

# What the bus itself says inside an account: replies, JetStream's calls and advisories.
OF_THE_BUS = ("_INBOX.", "_R_.", "$JS.")
WHAT_EVIL_MAY_SAY = ("wc.request.evil", "wc.cancel.evil.", "wc.delivered.evil")


def mesh_config(folder: Path) -> str:
    return server_config(
        {"acme": TenantSecret(password="of acme"), "evil": TenantSecret(password="of evil")},
        {user: f"of {user}" for user in (*SERVICES, "operator", "system")},
        store_dir=str(folder / "streams"),
        port=-1,
        ports_file_dir=str(folder),
    )


@pytest.fixture(scope="module")
def url(start_server) -> str:
    return start_server(mesh_config)


class Connections:
    """Connections of one test, each with the errors that the bus reported to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.opened: list[Client] = []
        self.errors: dict[str, list[str]] = {}

    async def as_user(self, user: str, *, password: str = "") -> Client:
        errors = self.errors.setdefault(user, [])

        async def on_error(error: Exception) -> None:
            errors.append(str(error))

        client = Client()
        # Before it is connected: what fails must be closed as well.
        self.opened.append(client)
        await client.connect(
            self.url,
            user=user,
            password=password or f"of {user}",
            error_cb=on_error,
            allow_reconnect=False,
        )
        return client


@pytest.fixture
async def connections(url: str) -> AsyncIterator[Connections]:
    opened = Connections(url)
    yield opened
    for client in opened.opened:
        await client.close()


async def settle(client: Client) -> None:
    """Return when the bus has dealt with everything that ``client`` sent."""
    # Once is not enough: nats-py writes a flush's ping ahead of what is still in its buffer.
    await client.flush()
    await client.flush()


class Mesh:
    """The mesh's side: its streams, and a wiretap on everything that is said in its account."""

    def __init__(self, operator: Client) -> None:
        self.operator = operator
        self.jetstream = operator.jetstream()
        self._heard: list[str] = []
        self._echo = asyncio.Event()

    async def open(self) -> None:
        for spec in STREAMS:
            await self.jetstream.add_stream(
                name=spec.name,
                subjects=list(spec.subjects),
                max_msgs_per_subject=spec.max_msgs_per_subject,
                allow_direct=spec.allow_direct,
                duplicate_window=0.1,
            )

        async def on_message(message) -> None:
            if message.subject == "echo":
                self._echo.set()
            else:
                self._heard.append(message.subject)

        await self.operator.subscribe(">", cb=on_message)

    async def heard(self) -> list[str]:
        """Return the subjects that were said in the mesh, but for what the bus itself says."""
        # What was said before the echo has been heard before it.
        self._echo.clear()
        await self.operator.publish("echo", b"")
        async with asyncio.timeout(5):
            await self._echo.wait()
        return [subject for subject in self._heard if not subject.startswith(OF_THE_BUS)]

    async def stored(self) -> dict[str, dict[str, int]]:
        """Return how many messages of each subject are in each stream."""
        # Stored in order: once these are acknowledged, so is all that came before them.
        for subject in ("wc.event.barrier._._", "wc.edge.barrier", "wc.final.barrier._"):
            await self.jetstream.publish(subject, b"{}")
        return {
            spec.name: {
                subject: count
                for subject, count in (await self._subjects(spec.name)).items()
                if "barrier" not in subject
            }
            for spec in STREAMS
        }

    async def _subjects(self, stream: str) -> dict[str, int]:
        info = await self.jetstream.stream_info(stream, subjects_filter=">")
        return info.state.subjects or {}


@pytest.fixture
async def mesh(connections: Connections) -> AsyncIterator[Mesh]:
    mesh = Mesh(await connections.as_user("operator"))
    await mesh.open()
    yield mesh
    for spec in STREAMS:
        with contextlib.suppress(NatsError):
            await mesh.jetstream.purge_stream(spec.name)


# --- what a tenant may do


async def test_a_tenant_submits_cancels_and_claims_and_hears_its_answers(
    connections: Connections, mesh: Mesh
) -> None:
    acme = await connections.as_user("acme")
    admission = await connections.as_user("admission")
    worker = await connections.as_user("worker")
    receipts = await acme.subscribe("wc.receipt.acme.*")
    answers = await acme.subscribe("wc.answer.acme.*")
    finals = await acme.subscribe("wc.final.acme.*")
    for_admission = await admission.subscribe("wc.*.acme.>")
    claims = await admission.subscribe("wc.delivered.*")
    await settle(acme)
    await settle(admission)

    acknowledgement = await acme.request("wc.request.acme", b'{"id":"r1"}', timeout=5)
    await acme.publish("wc.cancel.acme.r1", b"")
    await acme.publish("wc.delivered.acme", b'{"id":"r1"}')
    await settle(acme)
    cancel = await for_admission.next_msg(timeout=5)
    claim = await claims.next_msg(timeout=5)
    await admission.publish("wc.receipt.acme.r1", b"receipt")
    await worker.publish("wc.answer.acme.r1", b"delta")
    await settle(admission)
    await settle(worker)
    final = await worker.jetstream().publish("wc.final.acme.r1", b"final")
    heard = [await waiting.next_msg(timeout=5) for waiting in (receipts, answers, finals)]

    assert json.loads(acknowledgement.data)["stream"] == "REQUESTS"
    assert (await mesh.stored())["REQUESTS"] == {"wc.request.acme": 1}
    assert cancel.subject == "wc.cancel.acme.r1"
    assert claim.data == b'{"id":"r1"}'
    assert [(message.subject, message.data) for message in heard] == [
        ("wc.receipt.acme.r1", b"receipt"),
        ("wc.answer.acme.r1", b"delta"),
        ("wc.final.acme.r1", b"final"),
    ]
    assert final.stream == "ANSWERS"


# --- what a tenant may not do

CREATE_CONSUMER = json.dumps(
    {
        "stream_name": "REQUESTS",
        "config": {
            "name": "c",
            "deliver_subject": "wc.event.admitted.acme._",
            "ack_policy": "none",
        },
    }
).encode()

PUBLISHES = [
    pytest.param("wc.event.admitted.acme._", "", {}, id="an event"),
    pytest.param("wc.event.completed.evil.w1", "", {}, id="an event about itself"),
    pytest.param("wc.edge.evil", "", {}, id="what only the edge may say"),
    pytest.param("wc.request.acme", "", {}, id="in another tenant's name"),
    pytest.param("wc.cancel.acme.r1", "", {}, id="cancelling for another tenant"),
    pytest.param("wc.delivered.acme", "", {}, id="claiming for another tenant"),
    pytest.param("wc.receipt.acme.r1", "", {}, id="another tenant's receipt"),
    pytest.param("wc.answer.acme.r1", "", {}, id="another tenant's answer"),
    pytest.param("wc.final.acme.r1", "", {}, id="another tenant's final"),
    pytest.param("wc.final.evil.r1", "", {}, id="its own final"),
    pytest.param("wc.beat.w1", "", {}, id="a worker's beat"),
    pytest.param("$JS.ACK.REQUESTS.admission.1.1.1.1.1", "", {}, id="an acknowledgement"),
    pytest.param("$JS.API.STREAM.DELETE.EVENTS", "", {}, id="deleting the tape"),
    pytest.param("wc.request.evil", "wc.event.admitted.acme._", {}, id="reply into the tape"),
    pytest.param("wc.request.evil", "wc.edge.acme", {}, id="reply into the edge's subject"),
    pytest.param("wc.request.evil", "wc.final.acme.r1", {}, id="reply into another's final"),
    pytest.param("wc.request.evil", "$JS.API.STREAM.PURGE.EVENTS", {}, id="reply into the API"),
    pytest.param("wc.cancel.evil.r1", "wc.event.admitted.acme._", {}, id="cancel with a reply"),
    pytest.param("wc.delivered.evil", "wc.event.delivered.acme._", {}, id="claim with a reply"),
    pytest.param(
        "wc.request.evil", "", {"Nats-Trace-Dest": "wc.event.admitted.acme._"}, id="a trace"
    ),
    pytest.param(
        "wc.cancel.evil.r1", "", {"Nats-Trace-Dest": "wc.event.admitted.acme._"}, id="core trace"
    ),
    pytest.param(
        "wc.request.evil",
        "",
        {
            "Nats-Schedule": "@at 2020-01-01T00:00:00Z",
            "Nats-Schedule-Target": "wc.event.admitted.acme._",
        },
        id="a message for later",
    ),
    pytest.param("wc.request.evil", "", {"Nats-Rollup": "all"}, id="emptying by a header"),
]


@pytest.mark.parametrize(("subject", "reply", "headers"), PUBLISHES)
async def test_nothing_but_its_own_submissions_comes_in(
    connections: Connections, mesh: Mesh, subject: str, reply: str, headers: dict[str, str]
) -> None:
    await mesh.jetstream.publish("wc.event.admitted.acme._", b"evidence")
    acme = await connections.as_user("acme")
    evil = await connections.as_user("evil")
    await acme.request("wc.request.acme", b'{"id":"r1"}', timeout=5)
    before = await mesh.stored()

    await evil.publish(subject, b'{"id":"x"}', reply, headers)
    await settle(evil)

    heard = await mesh.heard()
    after = await mesh.stored()
    new = [said for said in heard if "evil" in said]
    assert [said for said in new if not said.startswith(WHAT_EVIL_MAY_SAY)] == []
    assert [said for said in heard if said not in new and "barrier" not in said] == [
        "wc.event.admitted.acme._",
        "wc.request.acme",
    ]
    after["REQUESTS"].pop("wc.request.evil", None)
    assert after == before
    assert before["EVENTS"] == {"wc.event.admitted.acme._": 1}


@pytest.mark.parametrize(
    ("subject", "payload"),
    [
        pytest.param("$JS.API.CONSUMER.CREATE.REQUESTS.c", CREATE_CONSUMER, id="deliver subject"),
        pytest.param(
            "$JS.API.CONSUMER.CREATE.REQUESTS.c.wc.request.evil", CREATE_CONSUMER, id="filtered"
        ),
        pytest.param("$JS.API.DIRECT.GET.EVENTS", b'{"seq":1}', id="direct get"),
        pytest.param(
            "$JS.API.DIRECT.GET.EVENTS.wc.event.admitted.acme._", b"", id="direct get by subject"
        ),
        pytest.param("$JS.API.DIRECT.GET.REQUESTS", b'{"seq":1}', id="direct get of a body"),
        pytest.param("$JS.API.STREAM.MSG.GET.EVENTS", b'{"seq":1}', id="get"),
        pytest.param("$JS.API.STREAM.INFO.EVENTS", b"", id="stream info"),
        pytest.param("$JS.API.STREAM.NAMES", b"", id="stream names"),
        pytest.param("$JS.API.STREAM.PURGE.EVENTS", b"", id="purge"),
        pytest.param(
            "$JS.API.STREAM.CREATE.MINE", b'{"name":"MINE","subjects":["wc.>"]}', id="own stream"
        ),
        pytest.param("$JS.API.INFO", b"", id="account info"),
        pytest.param("$SYS.REQ.SERVER.PING", b"", id="the server's own account"),
    ],
)
async def test_a_tenant_has_no_jetstream(
    connections: Connections, mesh: Mesh, subject: str, payload: bytes
) -> None:
    await mesh.jetstream.publish("wc.event.admitted.acme._", b"evidence")
    evil = await connections.as_user("evil")
    await evil.subscribe("wc.event.admitted.acme._")
    await evil.request("wc.request.evil", b'{"id":"x"}', timeout=5)
    before = await mesh.stored()

    try:
        answer = json.loads((await evil.request(subject, payload, timeout=2)).data)
    except NoRespondersError:
        answer = {"error": "nobody there"}

    assert "error" in answer
    assert answer.get("streams") is None
    assert await mesh.stored() == before
    assert [consumer.name for consumer in await mesh.jetstream.consumers_info("REQUESTS")] == []


async def test_a_tenant_hears_nothing_that_is_not_its_own(
    connections: Connections, mesh: Mesh
) -> None:
    acme = await connections.as_user("acme")
    evil = await connections.as_user("evil")
    worker = await connections.as_user("worker")
    filters = (">", "_INBOX.>", "wc.>", "wc.final.acme.*", "$JS.>", "_R_.>")
    listening = {each: await evil.subscribe(each) for each in filters}
    own = await evil.subscribe("wc.final.evil.*")
    await settle(evil)

    await acme.request("wc.request.acme", b'{"id":"r1"}', timeout=5)
    await mesh.jetstream.publish("wc.event.admitted.acme._", b"{}")
    await mesh.jetstream.publish("wc.event.admitted.evil._", b"{}")
    await worker.publish("wc.answer.acme.r1", b"delta")
    await settle(worker)
    await worker.jetstream().publish("wc.final.acme.r1", b"final")
    # Comes after all of it, so evil has heard by then what it will ever hear.
    await worker.jetstream().publish("wc.final.evil.r1", b"final")
    assert (await own.next_msg(timeout=5)).data == b"final"
    heard: set[str] = set()
    for each, subscription in listening.items():
        last = each.replace(">", "last").replace("*", "last")
        await evil.publish(last, b"")
        while (subject := (await subscription.next_msg(timeout=5)).subject) != last:
            heard.add(subject)

    # The last words of the other subscriptions, and what is its own.
    assert {subject for subject in heard if "last" not in subject} == {"wc.final.evil.r1"}


async def test_a_stored_message_is_not_traced_when_the_mesh_reads_it(
    connections: Connections, mesh: Mesh
) -> None:
    """The header stays on the stored message, and the mesh reads that inside its own account."""
    evil = await connections.as_user("evil")
    admission = await connections.as_user("admission")
    trace = {"Nats-Trace-Dest": "wc.event.admitted.acme._"}
    await evil.request("wc.request.evil", b'{"id":"x"}', timeout=5, headers=trace)

    reader = await admission.jetstream().pull_subscribe("", "reader", stream="REQUESTS")
    (message,) = await reader.fetch(1, timeout=5)
    await message.ack_sync(timeout=5)
    sequence = message.metadata.sequence.stream
    body = await admission.jetstream().get_msg("REQUESTS", sequence, direct=True)
    await mesh.jetstream.delete_consumer("REQUESTS", "reader")

    assert body.data == b'{"id":"x"}'
    assert set(await mesh.heard()) == {"wc.request.evil"}
    assert (await mesh.stored())["EVENTS"] == {}


async def test_a_forged_status_does_not_hide_that_a_message_was_delivered(
    connections: Connections, mesh: Mesh
) -> None:
    """A tenant's headers arrive as they were sent, so one can look like the bus's own status.

    What cannot be forged is the reply subject of a delivery and, on a direct get, the stream
    position: readers go by these.
    """
    evil = await connections.as_user("evil")
    operator = mesh.operator
    forged = {"Status": "404", "Description": "Consumer Deleted", "Nats-Sequence": "77"}
    await evil.request("wc.request.evil", b'{"id":"x"}', timeout=5, headers=forged)
    await mesh.jetstream.pull_subscribe("", "reader", stream="REQUESTS")
    inbox = operator.new_inbox()
    delivered = await operator.subscribe(inbox)
    await operator.publish("$JS.API.CONSUMER.MSG.NEXT.REQUESTS.reader", b"1", reply=inbox)
    message = await delivered.next_msg(timeout=5)
    sequence = int(message.reply.split(".")[5])
    direct = await operator.request(
        "$JS.API.DIRECT.GET.REQUESTS", json.dumps({"seq": sequence}).encode(), timeout=5
    )
    absent = await operator.request(
        "$JS.API.DIRECT.GET.REQUESTS", json.dumps({"seq": sequence + 9}).encode(), timeout=5
    )
    await mesh.jetstream.delete_consumer("REQUESTS", "reader")

    assert (message.headers or {})["Status"] == "404"
    assert message.reply.startswith("$JS.ACK.REQUESTS.reader.")
    assert (direct.headers or {})["Status"] == "404"
    assert (direct.headers or {})["Nats-Sequence"] == str(sequence)
    assert (absent.headers or {})["Status"] == "404"
    assert "Nats-Sequence" not in (absent.headers or {})


@pytest.mark.parametrize(
    ("user", "password"),
    [
        pytest.param("evil", "of acme", id="another's password"),
        pytest.param("T_acme", "of acme", id="an account's name"),
        pytest.param("admission", "of evil", id="a service"),
    ],
)
async def test_nobody_comes_in_without_the_right_password(
    connections: Connections, user: str, password: str
) -> None:
    with pytest.raises(NatsError, match="Authorization Violation"):
        await connections.as_user(user, password=password)


async def test_nobody_comes_in_without_any_password(url: str) -> None:
    client = Client()
    with pytest.raises(NatsError, match="Authorization Violation"):
        await client.connect(url, allow_reconnect=False)
    await client.close()


async def test_a_tenant_has_a_bounded_number_of_connections(start_server) -> None:
    def config(folder: Path) -> str:
        return server_config(
            {"acme": TenantSecret(password="of acme", connections_max=2)},
            {},
            store_dir=str(folder / "streams"),
            port=-1,
            ports_file_dir=str(folder),
        )

    connections = Connections(start_server(config))
    try:
        await connections.as_user("acme")
        await connections.as_user("acme")
        with pytest.raises(NatsError, match="maximum account active connections"):
            await connections.as_user("acme")
    finally:
        for client in connections.opened:
            await client.close()


# --- what a service may do inside the mesh


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_publishes_what_the_tables_say_and_nothing_else(
    connections: Connections, mesh: Mesh, service: Service
) -> None:
    client = await connections.as_user(service)
    addresses = {
        event_filter(flow.event, tenant="acme", scope="_"): flow.publishers for flow in EVENT_FLOWS
    } | {
        wildcards(channel.address).replace("*", "acme"): channel.publishers for channel in CHANNELS
    }
    for address in (*addresses, "wc.event.unknown.acme._", "_INBOX.of.another", "other"):
        await client.publish(address, b"{}")
    await settle(client)

    allowed = sorted(address for address, publishers in addresses.items() if service in publishers)
    assert sorted(await mesh.heard()) == allowed
    # What is refused is also reported, so that a service's log shows the mistake.
    refused = len(addresses) + 3 - len(allowed)
    assert len([e for e in connections.errors[service] if "permissions violation" in e]) == refused


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_does_not_change_history(
    connections: Connections, mesh: Mesh, service: Service
) -> None:
    await mesh.jetstream.publish("wc.event.admitted.acme._", b"evidence")
    before = await mesh.stored()
    client = await connections.as_user(service)
    config = {"name": "EVENTS", "subjects": ["wc.event.>"], "max_msgs": 1}
    for call, payload in (
        ("STREAM.UPDATE.EVENTS", config),
        ("STREAM.PURGE.EVENTS", {}),
        ("STREAM.MSG.DELETE.EVENTS", {"seq": 1}),
        ("STREAM.DELETE.EVENTS", {}),
    ):
        await client.publish(f"$JS.API.{call}", json.dumps(payload).encode())
    await settle(client)
    assert await mesh.stored() == before


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_uses_streams(
    connections: Connections, mesh: Mesh, service: Service
) -> None:
    await mesh.jetstream.publish("wc.event.admitted.acme._", b"evidence")
    jetstream = (await connections.as_user(service)).jetstream()
    reader = await jetstream.subscribe("wc.event.>", ordered_consumer=True)
    pulled = await jetstream.pull_subscribe("", f"of-{service}", stream="EVENTS")
    (message,) = await pulled.fetch(1, timeout=5)
    await message.ack_sync(timeout=5)
    stored = await jetstream.publish("wc.event.log_opened._._", b"{}")
    direct = await jetstream.get_msg("EVENTS", stored.seq, direct=True)
    assert (await reader.next_msg(timeout=5)).data == b"evidence"
    assert direct.data == b"{}"
    assert await jetstream.delete_consumer("EVENTS", f"of-{service}")


# --- that these tests can fail: the same attacks where there are no borders


def one_account_config(folder: Path) -> str:
    """One account; subject permissions are all that keeps the tenant from the tape."""
    return json.dumps(
        {
            "host": "127.0.0.1",
            "port": -1,
            "ports_file_dir": str(folder),
            "jetstream": {"store_dir": str(folder / "streams")},
            "authorization": {
                "users": [
                    {"user": "operator", "password": "of operator"},
                    {
                        "user": "evil",
                        "password": "of evil",
                        "permissions": {
                            "publish": [
                                "wc.request.evil",
                                "$JS.API.CONSUMER.CREATE.REQUESTS.>",
                            ]
                        },
                    },
                ]
            },
        }
    )


@pytest.fixture(scope="module")
def borderless_url(start_server) -> str:
    return start_server(one_account_config)


@pytest.fixture
async def borderless_mesh(connections: Connections, borderless_url: str) -> AsyncIterator[Mesh]:
    connections.url = borderless_url
    mesh = Mesh(await connections.as_user("operator"))
    await mesh.open()
    yield mesh
    for spec in STREAMS:
        await mesh.jetstream.delete_stream(spec.name)


async def test_without_borders_permissions_stop_a_plain_publish(
    connections: Connections, borderless_mesh: Mesh
) -> None:
    evil = await connections.as_user("evil")
    await evil.publish("wc.event.admitted.acme._", b"forged")
    await settle(evil)
    assert (await borderless_mesh.stored())["EVENTS"] == {}


async def test_without_borders_a_reply_subject_writes_to_the_tape(
    connections: Connections, borderless_mesh: Mesh
) -> None:
    evil = await connections.as_user("evil")
    await evil.publish("wc.request.evil", b'{"id":"x"}', reply="wc.event.admitted.acme._")
    await settle(evil)
    # The reply is sent by the stream, after it has stored; so wait for the submission first.
    await evil.request("wc.request.evil", b'{"id":"y"}', timeout=5)
    assert (await borderless_mesh.stored())["EVENTS"] == {"wc.event.admitted.acme._": 1}
    assert "wc.event.admitted.acme._" in await borderless_mesh.heard()


async def test_without_borders_a_deliver_subject_writes_to_the_tape(
    connections: Connections, borderless_mesh: Mesh
) -> None:
    evil = await connections.as_user("evil")
    # A stream alone is no listener to deliver to, but whoever delivers can also listen.
    await evil.subscribe("wc.event.admitted.acme._")
    await evil.request("wc.request.evil", b"forged", timeout=5)
    made = await evil.request("$JS.API.CONSUMER.CREATE.REQUESTS.c", CREATE_CONSUMER, timeout=5)
    assert "error" not in json.loads(made.data)
    stored: dict[str, int] = {}
    async with asyncio.timeout(5):
        while not stored:
            stored = (await borderless_mesh.stored())["EVENTS"]
    # What is delivered keeps the subject under which it was stored first.
    assert stored == {"wc.request.evil": 1}


async def test_without_borders_a_trace_writes_to_the_tape(
    connections: Connections, borderless_mesh: Mesh
) -> None:
    """Where the account is the same and the sender may publish there, as in its own account."""
    operator = borderless_mesh.operator
    trace = {"Nats-Trace-Dest": "wc.event.admitted.acme._"}
    await operator.request("wc.request.evil", b'{"id":"x"}', timeout=5, headers=trace)
    stored: dict[str, int] = {}
    async with asyncio.timeout(5):
        while not stored:
            stored = (await borderless_mesh.stored())["EVENTS"]
    assert set(stored) == {"wc.event.admitted.acme._"}


def test_every_crossing_is_tried() -> None:
    """A new way in must be thought of here too."""
    incoming = {c.subject.format(tenant="evil") for c in CROSSINGS if c.direction == "in"}
    assert incoming == {"wc.request.evil", "wc.cancel.evil.*", "wc.delivered.evil"}
