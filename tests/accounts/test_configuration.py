"""That the bus server takes the configuration as it was meant."""

import json
import urllib.request
from pathlib import Path

import pytest
from nats.aio.client import Client

from waterclock_proto.accounts import TenantSecret, accounts_config, server_config

PASSWORDS = [
    pytest.param('quote " and backslash \\', id="quoting"),
    pytest.param("\\n \\x41 \\t", id="what looks escaped"),
    pytest.param("$HOME", id="what looks like a variable"),
    pytest.param("# no comment // none", id="comment"),
    pytest.param("{a: [b]}; include './x'", id="syntax"),
    pytest.param("3000000000000000000k", id="number with a unit"),
    pytest.param("true", id="word"),
    pytest.param(" spaces at both ends ", id="spaces"),
    pytest.param("κλεψύδρα 水时计 🕰", id="not ASCII"),
    pytest.param("x" * 70, id="long"),
]


async def log_in(url: str, user: str, password: str) -> None:
    client = Client()
    try:
        await client.connect(url, user=user, password=password, allow_reconnect=False)
    finally:
        await client.close()


@pytest.mark.parametrize("password", PASSWORDS)
async def test_any_printable_password_is_the_password(start_server, password: str) -> None:
    def config(folder: Path) -> str:
        return server_config(
            {"acme": TenantSecret(password=password, user="the " + password)},
            {"ledger": password},
            store_dir=str(folder / "streams"),
            port=-1,
            ports_file_dir=str(folder),
        )

    url = start_server(config)
    for user in ("the " + password, "ledger"):
        await log_in(url, user, password)


async def test_a_bcrypt_hash_stands_for_its_password(start_server) -> None:
    # The hash of "secret" with the lowest cost.
    hashed = "$2b$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW"

    def config(folder: Path) -> str:
        return server_config(
            {"acme": TenantSecret(password=hashed)},
            {},
            store_dir=str(folder / "streams"),
            port=-1,
            ports_file_dir=str(folder),
        )

    await log_in(start_server(config), "acme", "secret")


def test_the_server_runs_with_the_settings_it_was_given(start_server) -> None:
    folders: list[Path] = []

    def config(folder: Path) -> str:
        folders.append(folder)
        return server_config(
            {"acme": TenantSecret(password="x")},
            {"operator": "y"},
            store_dir=str(folder / "streams"),
            port=-1,
            http_port=-1,
            server_name="one-of-two",
            sync_interval="always",
            max_payload_bytes=2_000_000,
            max_pending_bytes=3_000_000,
            max_file_store_bytes=4_000_000,
            ping_interval_s=5,
            ports_file_dir=str(folder),
        )

    start_server(config)
    (ports,) = folders[0].glob("*.ports")
    (monitor,) = json.loads(ports.read_text())["monitoring"]
    with urllib.request.urlopen(f"{monitor}/varz", timeout=5) as response:
        found = json.load(response)
    assert found["host"] == "127.0.0.1"
    assert found["server_name"] == "one-of-two"
    assert found["max_payload"] == 2_000_000
    assert found["max_pending"] == 3_000_000
    assert found["ping_interval"] == 5_000_000_000
    assert found["system_account"] == "SYS"
    assert found["jetstream"]["config"]["max_storage"] == 4_000_000
    assert found["jetstream"]["config"]["sync_always"] is True
    assert found["jetstream"]["config"]["store_dir"].startswith(str(folders[0] / "streams"))


def test_the_server_includes_accounts_from_a_file_of_their_own(start_server) -> None:
    def config(folder: Path) -> str:
        (folder / "accounts.conf").write_text(
            accounts_config({"acme": TenantSecret(password="x")}, {"operator": "y"})
        )
        own = {"port": -1, "host": "127.0.0.1", "ports_file_dir": str(folder)}
        return json.dumps(own)[1:-1] + "\ninclude accounts.conf\n"

    assert start_server(config).startswith("nats://127.0.0.1:")
