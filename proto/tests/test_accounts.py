"""The bus's configuration as text. What the server makes of it is in tests/accounts."""

import json
from typing import Any

import pytest

from waterclock_proto.accounts import (
    TenantSecret,
    accounts_config,
    server_config,
    service_permissions,
    tenant_account,
)
from waterclock_proto.flows import SERVICES
from waterclock_proto.subjects import REQUESTS

TENANTS = {"acme": TenantSecret(password="a"), "b-2": TenantSecret(password="b", user="bee")}
SERVICE_PASSWORDS = {user: f"of {user}" for user in (*SERVICES, "operator", "system")}


def accounts() -> dict[str, Any]:
    return json.loads(accounts_config(TENANTS, SERVICE_PASSWORDS))["accounts"]


def test_each_tenant_has_an_account_beside_the_meshs_and_the_servers() -> None:
    assert set(accounts()) == {"MESH", "SYS", "T_acme", "T_b-2"}
    assert tenant_account("acme") == "T_acme"


def test_only_the_mesh_has_jetstream() -> None:
    assert [name for name, account in accounts().items() if "jetstream" in account] == ["MESH"]


def test_every_export_is_for_one_account_and_every_import_has_its_export() -> None:
    made = accounts()
    exported = {
        (only, kind, export[kind])
        for export in made["MESH"]["exports"]
        for kind in ("service", "stream")
        if kind in export
        for (only,) in [export["accounts"]]
    }
    imported = {
        (name, kind, source["subject"])
        for name in ("T_acme", "T_b-2")
        for each in made[name]["imports"]
        for kind, source in each.items()
        if source["account"] == "MESH"
    }
    assert exported == imported
    assert len(exported) == 12
    for account, _, subject in exported:
        assert subject.split(".")[2] == account.removeprefix("T_")
    assert ("T_acme", "service", "wc.request.acme") in exported
    assert ("T_acme", "stream", "wc.final.acme.*") in exported


def test_tenants_export_nothing_and_the_mesh_imports_nothing() -> None:
    made = accounts()
    assert "imports" not in made["MESH"]
    assert all("exports" not in made[name] for name in ("T_acme", "T_b-2", "SYS"))


def test_users_are_where_they_belong() -> None:
    users = {
        name: [user["user"] for user in account["users"]] for name, account in accounts().items()
    }
    assert users == {
        "MESH": [*SERVICES, "operator"],
        "SYS": ["system"],
        "T_acme": ["acme"],
        "T_b-2": ["bee"],
    }


def test_users_that_have_no_password_do_not_exist() -> None:
    made = json.loads(accounts_config({}, {"ledger": "x"}))["accounts"]
    assert [user["user"] for user in made["MESH"]["users"]] == ["ledger"]
    assert made["SYS"]["users"] == []


@pytest.mark.parametrize("service", SERVICES)
def test_no_service_may_publish_everything(service) -> None:
    allowed = service_permissions(service)["publish"]["allow"]
    assert not {">", "wc.>", "wc.event.>", "$JS.>"} & set(allowed)


@pytest.mark.parametrize(
    ("tenants", "services", "expected"),
    [
        pytest.param({"a.b": "x"}, {}, "tenant 'a.b'", id="two tokens"),
        pytest.param({"*": "x"}, {}, "tenant '*'", id="wildcard"),
        pytest.param({"_": "x"}, {}, "tenant '_'", id="nobody"),
        pytest.param({"acme\n": "x"}, {}, "tenant 'acme\\n'", id="line feed"),
        pytest.param({"acme": ""}, {}, "tenant acme: password is empty", id="no password"),
        pytest.param({"acme": "a\0b"}, {}, "cannot be printed", id="NUL"),
        pytest.param({"acme": "a\nb"}, {}, "cannot be printed", id="line feed in a password"),
        pytest.param({"acme": "\ud800"}, {}, "cannot be printed", id="lone surrogate"),
        pytest.param({}, {"root": "x"}, "service 'root' is not one of admission, ", id="unknown"),
        pytest.param({"ledger": "x"}, {"ledger": "y"}, "the same user 'ledger'", id="same user"),
        pytest.param({}, {"ledger": ""}, "service ledger: password is empty", id="service"),
    ],
)
def test_what_cannot_be_is_named(
    tenants: dict[str, str], services: dict[str, str], expected: str
) -> None:
    secrets = {tenant: TenantSecret(password=password) for tenant, password in tenants.items()}
    with pytest.raises(ValueError, match="accounts cannot be made") as refused:
        accounts_config(secrets, services)
    assert expected in str(refused.value)


def test_all_mistakes_are_named_at_once_and_no_password_is() -> None:
    secrets = {"a b": TenantSecret(password="hidden\n"), "c": TenantSecret(password="")}
    with pytest.raises(ValueError, match="cannot be made") as refused:
        accounts_config(secrets, {"root": "x"})
    for part in ("'a b'", "tenant c", "'root'"):
        assert part in str(refused.value)
    assert "hidden" not in str(refused.value)


def test_a_server_that_takes_no_submission_of_full_size_is_refused() -> None:
    with pytest.raises(ValueError, match=f"expected at least {REQUESTS.max_msg_bytes}"):
        server_config(TENANTS, {}, store_dir="streams", max_payload_bytes=1_000_000)


def test_a_server_has_only_what_it_was_given() -> None:
    made = json.loads(server_config(TENANTS, {}, store_dir="streams"))
    assert made["jetstream"] == {"store_dir": "streams", "sync_interval": "200ms"}
    assert "http_port" not in made
    assert "ports_file_dir" not in made
    assert made["system_account"] == "SYS"
    assert made["accounts"] == json.loads(accounts_config(TENANTS, {}))["accounts"]
