"""What compose.yaml, the Dockerfile and the configuration beside them say of one another."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from waterclock_admission.__main__ import check as check_admission
from waterclock_ledger.config import check as check_ledger
from waterclock_runtime import limits
from waterclock_runtime.bus import BusSettings
from waterclock_runtime.config import SettingsLoader
from waterclock_runtime.service import ServiceSettings
from waterclock_scheduler.__main__ import check as check_scheduler
from waterclock_worker.__main__ import check as check_worker

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
CONFIG = tomllib.loads((ROOT / "deploy" / "waterclock.toml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
LASTING = [name for name in SERVICES if name != "init"]
OURS = [name for name in LASTING if name not in ("nats", "valkey")]


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def environment_references(value: object) -> list[str]:
    return re.findall(r"\$\{([A-Z_]+)", str(value))


def test_every_worker_of_the_configuration_is_a_service() -> None:
    started = [service["command"][0] for name, service in SERVICES.items() if "worker" in name]
    assert sorted(started) == sorted(CONFIG["workers"])


@pytest.mark.parametrize("name", list(CONFIG["workers"]))
def test_the_configuration_is_accepted_by_every_service(name: str) -> None:
    loader = SettingsLoader(file=ROOT / "deploy" / "waterclock.toml", environ={})
    loader.section("bus", BusSettings)
    loader.section("service", ServiceSettings)
    check_admission(loader)
    check_scheduler(loader)
    check_worker(name, loader)
    check_ledger(loader)
    loader.finish()


@pytest.mark.parametrize("name", LASTING)
def test_every_lasting_service_is_guarded(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"]
    assert service["restart"] == "unless-stopped"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert seconds(service["stop_grace_period"]) >= 10


@pytest.mark.parametrize("name", OURS)
def test_a_service_has_more_time_to_stop_than_it_takes(name: str) -> None:
    # After the grace the writer waits up to 3 s for acknowledgements, closing the bus up to 5 s.
    assert seconds(SERVICES[name]["stop_grace_period"]) > limits.STOP_GRACE_S + 8


@pytest.mark.parametrize("name", OURS)
def test_a_service_keeps_its_data_and_reads_only_its_own_configuration(name: str) -> None:
    service = SERVICES[name]
    target = service["build"]["target"]
    assert (
        service["environment"]["WATERCLOCK_CONFIG"] == f"/run/waterclock/{target}/waterclock.toml"
    )
    assert service["volumes"] == ["access:/run/waterclock:ro", f"{name}-data:/var/lib/waterclock"]
    assert service["environment"]["WATERCLOCK_SERVICE__DATA_DIR"] == "/var/lib/waterclock"
    port = service["environment"]["WATERCLOCK_SERVICE__HEALTH_PORT"]
    assert f"127.0.0.1:{port}/healthz" in str(service["healthcheck"]["test"])


def test_every_service_has_a_user_of_its_own_and_init_gives_it_its_files() -> None:
    owners = dict(
        argument.removeprefix("--owner=").split("=")
        for argument in SERVICES["init"]["entrypoint"]
        if argument.startswith("--owner=")
    )
    users: dict[str, str] = {"nats": SERVICES["nats"]["user"].partition(":")[0]}
    for target in {SERVICES[name]["build"]["target"] for name in OURS}:
        stage = re.search(rf" AS {target}\n(.*?)(\nFROM|\Z)", DOCKERFILE, re.DOTALL)
        assert stage is not None
        found = re.search(r"^USER (\d+):\1$", stage[1], re.MULTILINE)
        assert found is not None, f"{target}: no USER with a number"
        users[target] = found[1]
    assert owners == users
    assert len({*users.values(), SERVICES["valkey"]["user"].partition(":")[0], "0"}) == 7


def test_only_this_machine_can_reach_what_is_published() -> None:
    ports = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert sorted(ports) == ["admission", "nats"]
    assert all(port.startswith("127.0.0.1:") for found in ports.values() for port in found)


def test_only_admission_reaches_the_cache() -> None:
    assert [name for name in LASTING if "cache" in SERVICES[name]["networks"]] == [
        "valkey",
        "admission",
    ]


def test_no_secret_is_in_the_file() -> None:
    for name, service in SERVICES.items():
        for variable in service.get("environment", {}):
            assert not re.search("PASSWORD|KEY|SECRET|TOKEN", variable), f"{name}: {variable}"
    assert set(environment_references(COMPOSE)) == {
        "WATERCLOCK_SYNC_INTERVAL",
        "WATERCLOCK_BUS_PORT",
        "WATERCLOCK_HTTP_PORT",
    }


def test_images_have_the_version_of_what_is_in_them() -> None:
    project = tomllib.loads((ROOT / "cli" / "pyproject.toml").read_text())["project"]
    for name in ("init", *OURS):
        target = SERVICES[name]["build"]["target"]
        assert SERVICES[name]["image"] == f"waterclock-{target}:{project['version']}"


def test_nothing_is_in_the_file_that_docker_compose_1_refuses() -> None:
    assert not {"name", "include", "configs"} & set(COMPOSE)
    for service in SERVICES.values():
        assert "start_interval" not in service.get("healthcheck", {})
        assert "develop" not in service
        for dependency in service.get("depends_on", {}).values():
            assert set(dependency) == {"condition"}


def test_the_dockerfile_has_only_what_the_classic_builder_knows() -> None:
    assert not re.search(r"--mount|<<|--chmod|--link|^# *syntax", DOCKERFILE, re.MULTILINE)
