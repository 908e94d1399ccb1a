"""The command as a person uses it: start, send, stop, start again, replay."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

WATERCLOCK = (sys.executable, "-m", "waterclock")
START_WAIT_S = 60.0


def run(*argv: str, status: int = 0, stdin: str = "") -> str:
    done = subprocess.run(
        [*WATERCLOCK, *argv], input=stdin, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, (argv, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def reader_gone(data: Path) -> None:
    """``waterclock send … | true``: the answer finds nobody, which is no error of the command's."""
    process = subprocess.Popen(
        [*WATERCLOCK, "send", "--data", str(data), "--max-tokens", "4", "hello"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process, process.stderr as said:
        process.stdout.close()
        assert said.read() == ""
    assert process.returncode == 141


@contextmanager
def up(data: Path, *, killed: bool = False) -> Iterator[list[int]]:
    """A mesh by ``waterclock up``; yields the process ids, ends it by SIGINT, expects status 0.

    ``killed``: ends the command alone by SIGKILL, and waits for nothing else.
    """
    said = data.parent / "said"
    with said.open("w") as out:
        process = subprocess.Popen(
            [*WATERCLOCK, "up", "--data", str(data), "--port", "0", "--http-port", "0"],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        give_up_s = time.monotonic() + START_WAIT_S
        while "Ctrl-C stops it" not in said.read_text():
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < give_up_s, said.read_text()
            time.sleep(0.05)
        yield [process.pid, *children_of(process.pid)]
    finally:
        process.send_signal(signal.SIGKILL if killed else signal.SIGINT)
        status = process.wait(timeout=60)
    if killed:
        return
    assert status == 0, said.read_text()
    assert "goes on where this ended" in said.read_text()


def children_of(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody has waited for yet is not alive either.
    return ") Z " not in Path(f"/proc/{pid}/stat").read_text()


@pytest.mark.timeout(180)
def test_a_mesh_is_started_used_stopped_and_goes_on(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(data) as pids:
        assert len(pids) >= 8, "the command, bus, cache, admission, scheduler, two workers, ledger"
        said = run("send", "--data", str(data), "--max-tokens", "4", "What is a water clock?")
        assert "queue clock" in said
        assert "execution clock" in said
        said = run("send", "--data", str(data), "--max-tokens", "4", "-", stdin="Asked by a pipe?")
        assert "completed" in said
        reader_gone(data)
        said = run("doctor", "--data", str(data))
        assert "everything is in order" in said
        refused = run("up", "--data", str(data), status=1)
        assert "another mesh runs" in refused
        key = run("key", "acme", "--data", str(data)).strip()
        assert key.startswith("wc-")
        assert key not in (data / "waterclock.toml").read_text(), "only its hash is in the file"
    assert not [pid for pid in pids if is_alive(pid)], "something is left running"
    once = json.loads(run("replay", "--data", str(data), "--json"))
    with up(data):
        run("send", "--data", str(data), "--tenant", "globex", "--max-tokens", "4", "水钟是什么？")
    assert "0 violations, 0 open" in run("replay", "--data", str(data), "--check")
    twice = run("replay", "--data", str(data), "--json")
    assert twice == run("replay", "--data", str(data), "--json"), "byte for byte"
    groups = {
        group["tenant"]: group["outcomes"]["completed"] for group in json.loads(twice)["groups"]
    }
    assert groups == {"acme": 3, "globex": 1}
    assert once["totals"]["head_sequence"] < json.loads(twice)["totals"]["head_sequence"]


@pytest.mark.timeout(180)
def test_a_command_that_was_killed_can_be_started_again_at_once(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(data, killed=True) as pids:
        run("send", "--data", str(data), "--max-tokens", "4", "What is a water clock?")
        [ledger] = [pid for pid in pids if b"waterclock_ledger" in command_line(pid)]
        # However long it takes to end: it keeps the record locked meanwhile.
        os.kill(ledger, signal.SIGSTOP)
    goes_on = threading.Timer(5, os.kill, (ledger, signal.SIGCONT))
    goes_on.start()
    with up(data):
        goes_on.join()
        assert not [pid for pid in pids if is_alive(pid)], "two meshes in one folder"
        run("send", "--data", str(data), "--max-tokens", "4", "What is a water clock?")
    assert "0 violations, 0 open" in run("replay", "--data", str(data), "--check")


@pytest.mark.parametrize(
    ("argv", "helps"),
    [
        pytest.param(("replay",), "name the mesh's data folder", id="replay without a record"),
        pytest.param(("send", "x"), "waterclock up", id="send without a mesh"),
        pytest.param(("load",), "waterclock up", id="load without a mesh"),
        pytest.param(("key", "acme"), "waterclock up", id="key without a mesh"),
    ],
)
def test_without_a_mesh_the_command_says_what_to_do(
    tmp_path: Path, argv: tuple[str, ...], helps: str
) -> None:
    said = run(*argv, "--data", str(tmp_path / "nothing"), status=1)
    assert helps in " ".join(said.split())


def test_a_configuration_with_mistakes_is_refused_with_all_of_them(tmp_path: Path) -> None:
    config = tmp_path / "mesh.toml"
    config.write_text(
        '[tenants.acme]\ntire = "gold"\n[pools.a]\ndefault = true\npolicy = "lifo"\n'
        '[workers.w]\npool = "a"\nprofile = "tpu"\n'
    )
    for asked in ("doctor", "up"):
        said = run(asked, "--config", str(config), "--data", str(tmp_path / "d"), status=1)
        flat = " ".join(said.split())
        assert "did you mean 'tier'" in flat
        assert "[pools.a] policy" in flat
        assert "lifo" in flat
        assert "tpu" in flat
