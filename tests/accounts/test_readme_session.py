"""The session in proto/README.md, spoken to a real bus server by something that is not our code."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client

from waterclock_proto.accounts import TenantSecret, server_config
from waterclock_proto.subjects import STREAMS

README = Path(__file__).resolve().parents[2] / "proto" / "README.md"
SECONDS = 5


def session_lines() -> Iterator[tuple[str, str]]:
    """Yield ("<" or ">", line) of the session."""
    (block,) = re.findall(r"```\n(> CONNECT .*?)```", README.read_text(), flags=re.DOTALL)
    for line in block.splitlines():
        direction, _, said = line.partition(" ")
        assert direction in ("<", ">")
        yield direction, said


@pytest.fixture(scope="module")
def url(start_server) -> str:
    def config(folder: Path) -> str:
        return server_config(
            {"acme": TenantSecret(password="secret")},
            {"admission": "x", "worker": "y"},
            store_dir=str(folder / "streams"),
            port=-1,
            ports_file_dir=str(folder),
        )

    return start_server(config)


async def answer(services: tuple[Client, Client], said: str) -> None:
    """Publish as the mesh would what ``said`` shows of a receipt or final."""
    message = json.loads(said.replace(",…}", "}"))
    admission, worker = services
    kind, subject = (admission, "receipt") if "receipt" in message["kind"] else (worker, "final")
    await kind.publish(f"wc.{subject}.acme.{message['id']}", json.dumps(message).encode())


async def test_the_session_goes_as_it_is_written(url: str) -> None:
    admission, worker = Client(), Client()
    await admission.connect(url, user="admission", password="x")
    await worker.connect(url, user="worker", password="y")
    for spec in STREAMS:
        await admission.jetstream().add_stream(name=spec.name, subjects=list(spec.subjects))
    host, _, port = url.removeprefix("nats://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(SECONDS):
            assert (await reader.readline()).startswith(b"INFO ")
            lines = list(session_lines())
            for place, (direction, said) in enumerate(lines):
                if direction == ">":
                    writer.write(said.encode() + b"\r\n")
                    continue
                if said.startswith("MSG wc."):
                    await answer((admission, worker), lines[place + 1][1])
                # Up to where the page leaves something out.
                heard = (await reader.readline()).decode().removesuffix("\r\n")
                if said.startswith("{"):
                    shown = json.loads(said.replace(",…}", "}"))
                    assert shown.items() <= json.loads(heard).items()
                else:
                    assert heard.startswith(said.removesuffix("…"))
    finally:
        writer.close()
        await writer.wait_closed()
        await admission.close()
        await worker.close()


def test_the_session_is_whole() -> None:
    said = [line for _, line in session_lines()]
    assert len(said) == 12
    (body,) = (line for line in said if line.startswith('{"id"'))
    assert any(line.endswith(f" {len(body.encode())}") for line in said if line.startswith("PUB"))
