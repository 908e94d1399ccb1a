"""The bus server's configuration, made from the subject and flow tables.

The mesh has one account, and each tenant has its own. Subject permissions alone do not keep a
tenant out: the server checks neither the reply subject of a publish nor the deliver subject of a
consumer, so whoever may publish to one subject of an account can have the server write to any
other subject there. Across an account's border only exported subjects pass, and a reply goes back
to the account that asked.

* A tenant publishes what ``CROSSINGS`` lets in (service exports, each for this tenant's account
  alone) and receives what it lets out (stream exports). It has no JetStream.
* Inside the mesh a service may publish its own events and messages and use JetStream, but not
  change a stream, empty it or delete from it. This guards against mistakes; a service that means
  harm can still use reply subjects.
* Message tracing ends at the border, since no export allows it.

What is returned is the server's configuration language in its JSON form. It holds the passwords
that were given, so it belongs in a file that only the server can read. A password that looks like
a bcrypt hash (``$2a$…``) is taken by the server as the hash of the real one.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from waterclock_proto.flows import SERVICES, Service, publish_subjects
from waterclock_proto.names import Tenant
from waterclock_proto.subjects import CROSSINGS, NOBODY, REQUESTS

MESH_ACCOUNT = "MESH"
SYSTEM_ACCOUNT = "SYS"
OPERATOR = "operator"
"""May do everything inside the mesh's account."""
SYSTEM = "system"
"""Reads the server's own reports; no service needs it."""

RESPONSE_WAIT_S = 10
"""How long the server remembers who waits for a reply across the border. It remembers one entry
for each publish with a reply subject until the reply or this time, and nobody replies to a cancel,
so the server's default of two minutes would let one tenant fill its memory."""

MAX_PAYLOAD_BYTES = 1_048_576
MAX_PENDING_BYTES = 64 * 1_048_576
PING_INTERVAL_S = 20

_JETSTREAM_ALLOWED = ("$JS.API.>", "$JS.ACK.>", "$JS.FC.>")
_JETSTREAM_DENIED = (
    "$JS.API.STREAM.UPDATE.>",
    "$JS.API.STREAM.PURGE.>",
    "$JS.API.STREAM.DELETE.>",
    "$JS.API.STREAM.MSG.DELETE.>",
    "$JS.API.STREAM.RESTORE.>",
    "$JS.API.STREAM.SNAPSHOT.>",
)


class TenantSecret(Struct, frozen=True, kw_only=True):
    """How a tenant's programs log in to the bus."""

    password: str
    user: str = ""
    """Empty means the tenant's own name."""
    connections_max: int = 256


def tenant_account(tenant: str) -> str:
    """The name of a tenant's account; the prefix keeps it apart from the mesh's own."""
    return f"T_{tenant}"


def accounts_config(tenants: Mapping[str, TenantSecret], services: Mapping[str, str]) -> str:
    """The accounts as a configuration file of their own, to be included by a server's.

    Args:
        tenants: by tenant name.
        services: passwords by user: the services', and those of ``operator`` and ``system``
            where somebody is to have them.

    Raises:
        ValueError: a name, user or password that cannot be, with every such one named.
    """
    return _text(_accounts(tenants, services))


def server_config(
    tenants: Mapping[str, TenantSecret],
    services: Mapping[str, str],
    *,
    store_dir: str,
    host: str = "127.0.0.1",
    port: int = 4222,
    http_port: int | None = None,
    server_name: str = "waterclock",
    sync_interval: str = "200ms",
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    max_pending_bytes: int = MAX_PENDING_BYTES,
    max_file_store_bytes: int | None = None,
    ping_interval_s: int = PING_INTERVAL_S,
    ports_file_dir: str | None = None,
) -> str:
    """A whole configuration file for one server.

    Args:
        tenants: as for ``accounts_config``.
        services: as for ``accounts_config``.
        store_dir: where JetStream keeps its files.
        host: the address to listen on, for clients and for monitoring.
        port: for clients; -1 lets the system choose (see ``ports_file_dir``).
        http_port: for monitoring, which asks nobody for a password; None for none.
        server_name: how the server calls itself; without spaces.
        sync_interval: how long stored messages may wait before they are forced to the disk, as a
            duration such as ``200ms``, or ``always`` for before the acknowledgement. It is what a
            power cut can lose.
        max_payload_bytes: of one message, headers included.
        max_pending_bytes: of what a client may leave unread before it is cut off.
        max_file_store_bytes: of all streams together; None for what the server thinks right.
        ping_interval_s: how often silent clients are asked whether they live.
        ports_file_dir: where the server writes ``nats-server_<pid>.ports``, a JSON object with
            the addresses it listens on; None for nowhere.

    Raises:
        ValueError: as for ``accounts_config``, or messages that the streams allow would not fit.
    """
    if max_payload_bytes < REQUESTS.max_msg_bytes:
        raise ValueError(
            f"max_payload_bytes is {max_payload_bytes}, expected at least {REQUESTS.max_msg_bytes}:"
            " a submission of full size must fit"
        )
    config: dict[str, Any] = {
        "server_name": server_name,
        "host": host,
        "port": port,
        "max_payload": max_payload_bytes,
        "max_pending": max_pending_bytes,
        "ping_interval": f"{ping_interval_s}s",
        "jetstream": {"store_dir": store_dir, "sync_interval": sync_interval},
    }
    if http_port is not None:
        config["http_port"] = http_port
    if max_file_store_bytes is not None:
        config["jetstream"]["max_file_store"] = max_file_store_bytes
    if ports_file_dir is not None:
        config["ports_file_dir"] = ports_file_dir
    return _text(config | _accounts(tenants, services))


def service_permissions(service: Service) -> dict[str, Any]:
    """What one service's user may publish, in the form of the server's configuration."""
    return {
        "publish": {
            "allow": [*publish_subjects(service), *_JETSTREAM_ALLOWED],
            "deny": [*_JETSTREAM_DENIED],
        }
    }


def _accounts(
    tenants: Mapping[str, TenantSecret], services: Mapping[str, str]
) -> dict[str, dict[str, Any] | str]:
    _check(tenants, services)
    mesh_users: list[dict[str, Any]] = [
        {
            "user": service,
            "password": services[service],
            "permissions": service_permissions(service),
        }
        for service in SERVICES
        if service in services
    ]
    if OPERATOR in services:
        mesh_users.append({"user": OPERATOR, "password": services[OPERATOR]})
    system_users = [{"user": SYSTEM, "password": services[SYSTEM]}] if SYSTEM in services else []
    accounts: dict[str, Any] = {
        MESH_ACCOUNT: {
            "jetstream": "enabled",
            "users": mesh_users,
            "exports": [export for tenant in tenants for export in _exports(tenant)],
        },
        SYSTEM_ACCOUNT: {"users": system_users},
    }
    for tenant, secret in tenants.items():
        accounts[tenant_account(tenant)] = {
            "users": [{"user": secret.user or tenant, "password": secret.password}],
            "limits": {"max_connections": secret.connections_max},
            "imports": _imports(tenant),
        }
    return {"accounts": accounts, "system_account": SYSTEM_ACCOUNT}


def _exports(tenant: str) -> list[dict[str, Any]]:
    exports: list[dict[str, Any]] = []
    for crossing in CROSSINGS:
        subject = crossing.subject.format(tenant=tenant)
        # Without the list of accounts every tenant could import it.
        only = {"accounts": [tenant_account(tenant)]}
        if crossing.direction == "in":
            wait = {"response_threshold": f"{RESPONSE_WAIT_S}s"}
            exports.append({"service": subject} | only | wait)
        else:
            exports.append({"stream": subject} | only)
    return exports


def _imports(tenant: str) -> list[dict[str, Any]]:
    return [
        {
            "service" if crossing.direction == "in" else "stream": {
                "account": MESH_ACCOUNT,
                "subject": crossing.subject.format(tenant=tenant),
            }
        }
        for crossing in CROSSINGS
    ]


def _check(tenants: Mapping[str, TenantSecret], services: Mapping[str, str]) -> None:
    wrong: list[str] = []
    known = (*SERVICES, OPERATOR, SYSTEM)
    users: dict[str, str] = {}
    secrets = [(f"service {name}", name, password) for name, password in services.items()]
    secrets += [
        (f"tenant {tenant}", secret.user or tenant, secret.password)
        for tenant, secret in tenants.items()
    ]
    wrong += [
        f"service {name!r} is not one of {', '.join(known)}"
        for name in services
        if name not in known
    ]
    for tenant in tenants:
        try:
            msgspec.convert(tenant, Tenant)
        except msgspec.ValidationError as error:
            wrong.append(f"tenant {tenant!r} (a lone {NOBODY!r} is no name): {error}")
    for whose, user, password in secrets:
        if user in users:
            wrong.append(f"{whose} and {users[user]} have the same user {user!r}; name another")
        users[user] = whose
        for what, text in (("user", user), ("password", password)):
            if not text or not text.isprintable():
                # The text is not shown: it may be a password.
                wrong.append(f"{whose}: {what} is empty or has characters that cannot be printed")
    if wrong:
        raise ValueError("accounts cannot be made: " + "; ".join(wrong))


def _text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
