"""compose.yaml for real: images are built, the mesh runs, requests come from outside of it.

Needs a Docker daemon and Compose; where they are missing the tests say so and are skipped, which
counts as a failure with ``CI=true``. The tests stand in the order in which they run: the last ones
take the mesh down. The project has a name and ports of its own, so a mesh that runs is left alone.
"""

import asyncio
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from waterclock_ledger.check import check
from waterclock_ledger.fold import Life
from waterclock_ledger.record import read_record
from waterclock_producer import Delta, Final, Producer

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("admission", "ledger", "nats", "scheduler", "valkey", "worker-en", "worker-zh")
RECORD = "/var/lib/waterclock/ledger"
BUILD_WAIT_S = 420
HEALTHY_WAIT_S = 90
ANSWER_WAIT_S = 60
KILLED_REQUESTS = 24
KILLED_TOKENS = 400
KILL_OWN_WORKER = """
import os, signal
for entry in os.listdir("/proc"):
    # The first process is Docker's; what it started is the service.
    if entry.isdecimal():
        parent = open(f"/proc/{entry}/stat").read().rpartition(")")[2].split()[1]
        if parent == "1":
            os.kill(int(entry), signal.SIGKILL)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUILD_WAIT_S + HEALTHY_WAIT_S + 120)]


class Project:
    """One mesh of containers under a name and ports of its own."""

    def __init__(self, compose: Sequence[str]) -> None:
        self.name = f"waterclock-test-{secrets.token_hex(3)}"
        self.bus_port = _free_port()
        self.http_port = _free_port()
        self._compose = [*compose, "-p", self.name, "-f", str(ROOT / "compose.yaml")]
        self._environ = {
            **os.environ,
            "WATERCLOCK_BUS_PORT": str(self.bus_port),
            "WATERCLOCK_HTTP_PORT": str(self.http_port),
        }
        self.answered: dict[str, Final] = {}
        """By id: what producers were told, to be found again in the record."""
        self.answered_by: dict[str, str] = {}
        """By id: the worker that must have been chosen."""

    def compose(self, *arguments: str, wait_s: int = 120) -> str:
        ran = subprocess.run(
            [*self._compose, *arguments],
            env=self._environ,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=wait_s,
            check=False,
        )
        assert ran.returncode == 0, f"compose {' '.join(arguments)}:\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    def container(self, service: str) -> str:
        return self.compose("ps", "-a", "-q", service).strip()

    def inspect(self, service: str) -> dict[str, Any]:
        return json.loads(docker("inspect", self.container(service)))[0]

    def wait_healthy(self, services: Sequence[str] = SERVICES) -> None:
        give_up_s = time.monotonic() + HEALTHY_WAIT_S
        while True:
            states = {
                name: self.inspect(name)["State"].get("Health", {}).get("Status")
                for name in services
            }
            if set(states.values()) == {"healthy"}:
                return
            if time.monotonic() > give_up_s:
                wrong = [name for name, state in states.items() if state != "healthy"]
                logs = self.compose("logs", "--no-color", "--tail", "20", *wrong)
                raise AssertionError(f"not healthy in {HEALTHY_WAIT_S} s: {states}\n{logs}")
            time.sleep(0.5)

    def access(self, tenant: str) -> dict[str, str]:
        return json.loads(self.compose("run", "--rm", "init", "--show", tenant))

    def producer(self, tenant: str) -> Producer:
        access = self.access(tenant)
        return Producer.connect(
            f"nats://127.0.0.1:{self.bus_port}",
            tenant=tenant,
            user=access["user"],
            password=access["password"],
        )

    def ask(self, prompt: str, api_key: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, body and headers of one chat completion over HTTP."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}/v1/chat/completions",
            data=json.dumps(
                {
                    "model": "sim-8b",
                    "messages": [{"role": "user", "content": prompt}],
                    "max_tokens": 20,
                }
            ).encode(),
            headers={"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_WAIT_S) as response:
                headers = {key.lower(): value for key, value in response.headers.items()}
                return response.status, json.load(response), headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error), {}

    def copy_record(self, to: Path) -> Path:
        """The ledger's record as it lies in the volume, read from outside of the mesh."""
        docker("cp", f"{self.container('ledger')}:{RECORD}", str(to))
        return to

    def remains(self) -> list[str]:
        """What Docker still has of this project."""
        label = f"label=com.docker.compose.project={self.name}"
        return [
            line
            for kind in (["ps", "-a"], ["volume", "ls"], ["network", "ls"])
            for line in docker(*kind, "-q", "--filter", label).split()
        ]


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    found = Project(_compose_command())
    try:
        found.compose("build", wait_s=BUILD_WAIT_S)
        found.compose("up", "-d", wait_s=HEALTHY_WAIT_S)
        found.wait_healthy()
        yield found
    finally:
        found.compose("down", "-v", "--timeout", "25")


def docker(*arguments: str) -> str:
    ran = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, f"docker {' '.join(arguments)}: {ran.stderr}"
    return ran.stdout


def test_services_run_as_users_of_their_own_and_cannot_write_elsewhere(project: Project) -> None:
    users = {}
    for name in SERVICES:
        inspected = project.inspect(name)
        assert inspected["HostConfig"]["ReadonlyRootfs"] is True
        users[name] = inspected["Config"]["User"].partition(":")[0]
        refused = _exec(project, name, "sh", "-c", "echo x > /etc/x")
        assert refused.returncode != 0
        assert "Read-only file system" in refused.stderr
    assert "0" not in users.values()
    assert "" not in users.values()
    assert users["worker-zh"] == users["worker-en"]
    assert len(set(users.values())) == len(SERVICES) - 1


@pytest.mark.parametrize(
    "path", ["access.json", "nats/nats.conf", "admission/waterclock.toml", "ledger/waterclock.toml"]
)
def test_a_worker_cannot_read_the_secrets_of_others(project: Project, path: str) -> None:
    refused = _exec(project, "worker-zh", "cat", f"/run/waterclock/{path}")
    assert refused.returncode != 0
    assert refused.stdout == ""
    assert "Permission denied" in refused.stderr


def test_no_secret_can_be_seen_from_outside_or_in_the_logs(project: Project) -> None:
    access = _exec(project, "nats", "cat", "/run/waterclock/nats/nats.conf")
    passwords = [
        user["password"]
        for account in json.loads(access.stdout)["accounts"].values()
        for user in account.get("users", [])
    ]
    assert len(passwords) >= 8
    shown = project.compose("logs", "--no-color") + "".join(
        json.dumps(project.inspect(name)) for name in SERVICES
    )
    assert [password for password in passwords if password in shown] == []


def test_a_request_over_http_is_answered(project: Project) -> None:
    status, answer, headers = project.ask(
        "What is a water clock?", project.access("acme")["api_key"]
    )
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] >= 1
    assert "x-queue-time-ms" in headers
    assert "x-exec-time-ms" in headers


def test_a_request_without_a_key_is_refused(project: Project) -> None:
    status, answer, _ = project.ask("hello", "wc-nobody")
    assert status == 401, answer


@pytest.mark.parametrize(
    ("prompt", "worker"),
    [
        pytest.param("What is a water clock?", "en-1", id="English"),
        pytest.param("水钟是什么？请用中文回答。", "zh-1", id="Chinese"),
    ],
)
async def test_a_request_over_nats_from_outside_is_answered(
    project: Project, prompt: str, worker: str
) -> None:
    async with project.producer("globex") as producer:
        handle = await producer.submit(prompt=prompt, max_tokens=20, stream=True)
        final = await handle.result(timeout_s=ANSWER_WAIT_S)
        receipt = await handle.receipt(timeout_s=ANSWER_WAIT_S)
    assert final.outcome == "completed", final
    assert final.text
    assert receipt.outcome == "admitted"
    project.answered[final.id] = final
    project.answered_by[final.id] = worker


async def test_a_worker_killed_while_it_works_is_restarted_and_nothing_is_lost(
    project: Project,
) -> None:
    before = project.inspect("worker-en")
    async with project.producer("initech") as producer:
        handles = [
            await producer.submit(
                prompt=f"Tell me the story of water clock number {number}.",
                max_tokens=KILLED_TOKENS,
                ignore_eos=True,
                stream=True,
                deadline_ms=120_000,
            )
            for number in range(KILLED_REQUESTS)
        ]
        async with asyncio.timeout(ANSWER_WAIT_S):
            async for piece in handles[0].stream():
                if isinstance(piece, Delta):
                    break
        killed = await asyncio.to_thread(
            _exec, project, "worker-en", "python", "-c", KILL_OWN_WORKER
        )
        finals = [await handle.result(timeout_s=2 * ANSWER_WAIT_S) for handle in handles]
    # The exec may end with its container; whether it killed is seen from what Docker says.
    after = await asyncio.to_thread(_wait, lambda: _restarted(project, "worker-en", before))
    assert after is not None
    assert after["Id"] == before["Id"], killed
    assert [final.outcome for final in finals] == ["completed"] * KILLED_REQUESTS
    assert {final.usage.completion_tokens for final in finals if final.usage} == {KILLED_TOKENS}
    assert max(final.attempt for final in finals) >= 2
    project.answered |= {final.id: final for final in finals}
    await asyncio.to_thread(project.wait_healthy, ["worker-en"])


def test_the_record_is_read_from_outside_and_shows_every_request_once(
    project: Project, tmp_path: Path
) -> None:
    assert project.answered, (
        "expected the requests of the tests before this one; run the whole file"
    )

    def settled() -> bool:
        copy = project.copy_record(tmp_path / secrets.token_hex(3))
        return not check(copy).open

    _wait(settled)
    copy = project.copy_record(tmp_path / "record")
    assert check(copy).violations == []
    record = read_record(copy, settle_after=None)
    (tape,) = record.tapes
    lives = {summary.id: summary for summary in tape.summaries()}
    assert set(project.answered) <= set(lives)
    for request_id, final in project.answered.items():
        assert lives[request_id].outcome == final.outcome
        assert lives[request_id].tries == final.attempt
    assert any(summary.lost for summary in lives.values())
    for request_id, worker in project.answered_by.items():
        life = tape.find("globex", request_id)
        assert isinstance(life, Life)
        assert [t.dispatched.worker.rpartition("-")[0] for t in life.tries] == [worker]
    assert record.holes == 0
    for arguments in (["--check"], ["--clock", "exec", "--json"]):
        replayed = subprocess.run(
            [sys.executable, "-m", "waterclock", "replay", "--data", str(copy), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    report = json.loads(replayed.stdout)
    completed = sum(group["outcomes"]["completed"] for group in report["groups"])
    assert completed == len(lives)


def test_secrets_and_record_outlive_the_containers(project: Project, tmp_path: Path) -> None:
    access = project.access("acme")
    before = read_record(project.copy_record(tmp_path / "before")).head_sequence
    project.compose("down", "--timeout", "25")
    project.compose("up", "-d", wait_s=HEALTHY_WAIT_S)
    project.wait_healthy()
    assert project.access("acme") == access
    status, answer, _ = project.ask("Still there?", access["api_key"])
    assert status == 200, answer

    def grown() -> bool:
        copy = project.copy_record(tmp_path / secrets.token_hex(3))
        return read_record(copy).head_sequence > before and not check(copy).open

    _wait(grown)
    copy = project.copy_record(tmp_path / "after")
    assert check(copy).violations == []
    lives = {summary.id for tape in read_record(copy).tapes for summary in tape.summaries()}
    assert set(project.answered) <= lives


def test_services_end_by_themselves_within_their_grace(project: Project) -> None:
    project.compose("stop")
    ended = {name: project.inspect(name)["State"]["ExitCode"] for name in SERVICES}
    # 137 would be a service that had to be killed.
    assert {name: code for name, code in ended.items() if code != 0} == {}


def test_down_with_volumes_leaves_nothing(project: Project) -> None:
    project.compose("down", "-v", "--timeout", "25")
    assert project.remains() == []


def _compose_command() -> Sequence[str]:
    """Compose 2 where it is there, else docker-compose; skips where Docker is not."""
    if shutil.which("docker") is None:
        pytest.skip("not tested: there is no `docker`; install Docker and Compose")
    answers = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    if answers.returncode != 0:
        reason = " ".join(answers.stderr.split())
        pytest.skip(f"not tested: no Docker daemon answers ({reason}); start one")
    for command in (["docker", "compose"], ["docker-compose"]):
        if (
            shutil.which(command[0])
            and not subprocess.run(
                [*command, "version"], capture_output=True, check=False
            ).returncode
        ):
            return command
    pytest.skip("not tested: neither `docker compose` nor `docker-compose` is there; install one")


def _exec(project: Project, service: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["docker", "exec", project.container(service), *command],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def _restarted(project: Project, service: str, before: dict[str, Any]) -> dict[str, Any] | None:
    now = project.inspect(service)
    again = now["RestartCount"] > before["RestartCount"] and now["State"]["Running"]
    return now if again else None


def _wait(read: Callable[[], T]) -> T:
    give_up_s = time.monotonic() + 30
    while not (found := read()):
        assert time.monotonic() < give_up_s, f"{read} did not come true in 30 s"
        time.sleep(0.3)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
