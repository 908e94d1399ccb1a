"""Makes the secrets of a mesh in containers once, and the files that carry them.

``python -m waterclock.init --dir DIR --config FILE`` keeps what it finds, adds what is missing, and
writes::

    DIR/access.json                 every secret, for whoever runs the mesh
    DIR/nats/nats.conf              the bus's configuration
    DIR/<service>/waterclock.toml   FILE with this service's own secrets in it

Each file is readable to one user alone: to whoever runs this, or to the one that ``--owner`` names.
It needs no network and none of what the services need.
"""

import argparse
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from waterclock.mesh import Access, MeshError, TenantAccess
from waterclock_proto.accounts import OPERATOR, TenantSecret, server_config
from waterclock_proto.flows import SERVICES

BUS: Final = "nats"
BUS_PORT: Final = 4222
MONITOR_PORT: Final = 8222
SYNC_INTERVAL: Final = re.compile(r"always|[1-9][0-9]*(ms|s|m)")
SIZES: Final = ("requests_bytes_max", "events_bytes_max", "answers_bytes_max")

Additions = Mapping[tuple[str, ...], Mapping[str, str | list[str]]]
"""What one service's configuration has beyond the operator's: table → key → value."""


def main(argv: Sequence[str] | None = None) -> None:
    """The process; exits with 1 if it could not do everything."""
    options = _parser().parse_args(argv)
    try:
        if options.show is not None:
            print(show(options.dir, options.config, options.show))
        else:
            print(
                prepare(
                    options.dir,
                    options.config,
                    store=options.store,
                    sync_interval=options.sync_interval,
                    owners=dict(options.owner),
                    renew=options.renew,
                )
            )
    except MeshError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def prepare(
    folder: Path,
    config_file: Path,
    *,
    store: Path,
    sync_interval: str = "200ms",
    owners: Mapping[str, int] | None = None,
    renew: Sequence[str] = (),
) -> str:
    """Make what is missing and write all files anew; returns what to tell whoever runs it.

    Args:
        folder: where the files go; made if it is not there.
        config_file: the operator's configuration, without a secret in it.
        store: where the bus keeps its streams.
        sync_interval: see ``server_config``.
        owners: user ids by service, ``nats`` among them; the bus's gets ``store`` as well. Only
            root can give files away.
        renew: tenants and services that get new secrets.

    Raises:
        MeshError: says what was expected, what was found, and what to do.
    """
    owners = owners or {}
    text, config = _read_config(config_file)
    tenants = list(config["tenants"])
    _check(config_file, config, sync_interval, owners, renew)
    folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    access_file = folder / "access.json"
    known = _read_access(access_file) if access_file.exists() else None
    access = complete(known, tenants, renew)
    # Before everything that is made from it: a secret that is in use is never lost.
    _write(access_file, msgspec.json.format(msgspec.json.encode(access), indent=2) + b"\n")
    try:
        bus_config = _bus_config(access, config, store, sync_interval)
        configs = {
            service: with_additions(text, _additions(service, access, config))
            for service in SERVICES
        }
    except ValueError as error:
        raise MeshError(f"{config_file}: {error}") from error
    _write_owned(folder / BUS / "nats.conf", bus_config, owners.get(BUS))
    for service, content in configs.items():
        _write_owned(folder / service / "waterclock.toml", content, owners.get(service))
    if BUS in owners:
        store.mkdir(parents=True, exist_ok=True)
        _give(store, owners[BUS])
    return "\n".join(_report(folder, known, access, tenants, config, store))


def show(folder: Path, config_file: Path, tenant: str) -> str:
    """How the programs of ``tenant`` get in, as a JSON object.

    Raises:
        MeshError: nothing was made yet, or there is no such tenant.
    """
    _, config = _read_config(config_file)
    access_file = folder / "access.json"
    if not access_file.exists():
        raise MeshError(f"{access_file} is missing: run this without --show first")
    access = _read_access(access_file)
    if tenant not in config["tenants"] or tenant not in access.tenants:
        known = sorted(set(access.tenants) & set(config["tenants"]))
        raise MeshError(
            f"tenant {tenant!r}: expected one of {known}; a new one comes into {config_file},"
            " and then this is run without --show"
        )
    shown = {"user": tenant, "password": access.tenants[tenant].password}
    if "api_key_sha256" not in config["tenants"][tenant]:
        shown["api_key"] = access.tenants[tenant].api_key
    return json.dumps(shown, indent=2)


def complete(known: Access | None, tenants: Sequence[str], renew: Sequence[str] = ()) -> Access:
    """``known`` with a secret for everybody who needs one; those of ``renew`` get new ones.

    Secrets of tenants that are gone are kept, so that a tenant that comes back is the same.
    """
    services = {} if known is None else dict(known.services)
    by_tenant = {} if known is None else dict(known.tenants)
    for name in renew:
        services.pop(name, None)
        by_tenant.pop(name, None)
    for name in (*SERVICES, OPERATOR):
        services.setdefault(name, secrets.token_urlsafe(24))
    for name in tenants:
        by_tenant.setdefault(
            name,
            TenantAccess(
                password=secrets.token_urlsafe(24), api_key=f"wc-{secrets.token_urlsafe(24)}"
            ),
        )
    mesh_key = secrets.token_hex(32) if known is None else known.mesh_key
    return Access(services=services, tenants=by_tenant, mesh_key=mesh_key)


def with_additions(text: str, additions: Additions) -> str:
    """TOML ``text`` with ``additions`` written into its tables, its comments kept.

    Raises:
        ValueError: a key is there already, or a table is not written as ``[a.b]`` on a line of its
            own, so that nothing can be added to it.
    """
    expected = tomllib.loads(text)
    result = text
    for path, values in additions.items():
        table: dict[str, Any] = expected
        for part in path:
            table = table.setdefault(part, {})
        name = ".".join(path)
        for key in values:
            if key in table:
                raise ValueError(f"[{name}] {key} stands there already; expected it to be left out")
        table.update(values)
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        header = re.compile(rf"^[ \t]*\[[ \t]*{re.escape(name)}[ \t]*\][ \t]*(#.*)?$", re.MULTILINE)
        found = header.search(result)
        if found is None:
            result = f"{result.rstrip()}\n\n[{name}]\n{lines}"
        else:
            result = (
                f"{result[: found.end()]}\n{lines}{result[found.end() :].removeprefix(chr(10))}"
            )
    try:
        same = tomllib.loads(result) == expected
    except tomllib.TOMLDecodeError:
        same = False
    if not same:
        names = ", ".join(f"[{'.'.join(path)}]" for path in additions)
        raise ValueError(f"expected {names} as lines of their own where they are set at all")
    return result


def _additions(service: str, access: Access, config: Mapping[str, Any]) -> Additions:
    additions: dict[tuple[str, ...], Mapping[str, str | list[str]]] = {
        ("bus",): {"user": service, "password": access.services[service]},
        ("service",): {"mesh_key": access.mesh_key},
    }
    if service == "admission":
        # Keys that the operator made elsewhere stand in the configuration, and count alone.
        for tenant, settings in config["tenants"].items():
            if "api_key_sha256" not in settings:
                digest = hashlib.sha256(access.tenants[tenant].api_key.encode()).hexdigest()
                additions["tenants", tenant] = {"api_key_sha256": [digest]}
    return additions


def _bus_config(access: Access, config: Mapping[str, Any], store: Path, sync_interval: str) -> str:
    sizes = list(_sizes(config).values())
    text = server_config(
        {name: TenantSecret(password=access.tenants[name].password) for name in config["tenants"]},
        access.services,
        store_dir=str(store),
        host="0.0.0.0",
        port=BUS_PORT,
        sync_interval=sync_interval,
        max_file_store_bytes=None if None in sizes else sum(sizes),
    )
    # Monitoring asks nobody for a password, so only the container itself can ask it.
    return json.dumps(json.loads(text) | {"http": f"127.0.0.1:{MONITOR_PORT}"}, indent=2) + "\n"


def _read_config(file: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8")
        config = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MeshError(f"{file}: {error}") from error
    tenants: Any = config.get("tenants")
    if not isinstance(tenants, dict) or not tenants:
        raise MeshError(f"{file}: expected at least one [tenants.<name>], found none")
    wrong = [
        name for name, table in cast("dict[str, Any]", tenants).items() if type(table) is not dict
    ]
    if wrong:
        raise MeshError(f"{file}: [tenants] {', '.join(wrong)}: expected [tenants.<name>] tables")
    return text, config


def _check(
    config_file: Path,
    config: Mapping[str, Any],
    sync_interval: str,
    owners: Mapping[str, int],
    renew: Sequence[str],
) -> None:
    parts = (BUS, *SERVICES)
    wrong = [
        f"--owner {name}: expected one of {', '.join(parts)}"
        for name in owners
        if name not in parts
    ]
    if not SYNC_INTERVAL.fullmatch(sync_interval):
        wrong.append(f"--sync-interval {sync_interval!r}: expected such as 200ms, 2s, or always")
    renewable = [*SERVICES, OPERATOR, *config["tenants"]]
    wrong += [
        f"--renew {name}: expected one of {', '.join(renewable)}"
        for name in renew
        if name not in renewable
    ]
    for name, size in _sizes(config).items():
        if size is not None and (type(size) is not int or size < 1):
            wrong.append(f"{config_file}: [bus] {name}: expected bytes, found {size!r}")
    if wrong:
        raise MeshError("; ".join(wrong))


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the operator set of the streams' sizes; None for what is left to the services."""
    bus: Any = config.get("bus")
    table = cast("dict[str, Any]", bus) if isinstance(bus, dict) else {}
    return {name: table.get(name) for name in SIZES}


def _read_access(file: Path) -> Access:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Access)
    except (OSError, msgspec.MsgspecError) as error:
        raise MeshError(
            f"{file}: {error}; restore it from a backup, since a new mesh key fits no old body"
        ) from error


def _report(
    folder: Path,
    known: Access | None,
    access: Access,
    tenants: Sequence[str],
    config: Mapping[str, Any],
    store: Path,
) -> list[str]:
    old = {} if known is None else known.tenants
    made = [name for name in tenants if old.get(name) != access.tenants[name]]
    kept = [name for name in tenants if name not in made]
    lines = [
        f"secrets of {', '.join(names)}: {what}"
        for what, names in (("made", made), ("kept", kept))
        if names
    ]
    lines.append(f"all secrets: {folder / 'access.json'}; one tenant's: --show {tenants[0]}")
    sizes = list(_sizes(config).values())
    if store.is_dir() and None not in sizes:
        stored_bytes = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
        room_bytes = stored_bytes + shutil.disk_usage(store).free
        if sum(sizes) > room_bytes:
            lines.append(
                f"warning: [bus] {', '.join(SIZES)} add up to {sum(sizes)} bytes, but the disk has"
                f" room for {room_bytes}: make them smaller, or the disk may fill up"
            )
    return lines


def _write_owned(path: Path, text: str, owner: int | None) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    _write(path, text.encode(), owner)
    if owner is not None:
        _give(path.parent, owner)


def _write(path: Path, content: bytes, owner: int | None = None) -> None:
    """Replace ``path`` in one step, readable to one user alone from the first moment."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if owner is not None:
            _give(beside, owner)
        beside.replace(path)
    except OSError as error:
        raise MeshError(f"{path} cannot be written: {error.strerror}") from error


def _give(path: Path, owner: int) -> None:
    if path.stat().st_uid == owner:
        return
    try:
        os.chown(path, owner, owner)
    except OSError as error:
        raise MeshError(f"{path} cannot be given to user {owner}: {error.strerror}") from error


def _owner(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"expected NAME=USER-ID, found {text!r}")
    return name, int(number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m waterclock.init",
        description="Makes the secrets of a mesh in containers, and the files that carry them.",
    )
    parser.add_argument("--dir", type=Path, required=True, help="where the files go")
    parser.add_argument("--config", type=Path, required=True, help="the mesh's configuration")
    parser.add_argument(
        "--store", type=Path, default=Path("/data"), help="where the bus keeps its streams"
    )
    parser.add_argument(
        "--sync-interval",
        default="200ms",
        help="what a power cut may lose of the bus: a duration, or 'always' for nothing",
    )
    parser.add_argument(
        "--owner",
        type=_owner,
        action="append",
        default=[],
        metavar="NAME=USER-ID",
        help="whom a service's files belong to; may be repeated",
    )
    parser.add_argument(
        "--renew",
        action="append",
        default=[],
        metavar="NAME",
        help="a tenant or service that gets new secrets; may be repeated",
    )
    parser.add_argument(
        "--show", metavar="TENANT", help="print a tenant's secrets, do nothing else"
    )
    return parser


if __name__ == "__main__":
    main()
