"""The same load through the LiteLLM proxy, for comparison. Optional: it has its own environment.

``make bench-litellm`` installs the proxy into ``.venv-litellm`` and adds ``litellm.*`` to the
results. Before it stands the same instant engine as before the mesh, behind the same HTTP
server. What the proxy does not do: keep evidence of when a request waited and when it ran.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from run import HERE, IN_FLIGHT, RESULTS, generate_http, render, start_engine

VENV = HERE.parent / ".venv-litellm"
START_WAIT_S = 90.0

CONFIG = """
model_list:
  - model_name: sim-8b
    litellm_params:
      model: openai/sim-8b
      api_base: {engine}/v1
      api_key: none
general_settings:
  master_key: {key}
litellm_settings:
  telemetry: false
  num_retries: 0
"""


async def measure(seconds: float, warm_up_s: float) -> dict[str, float]:
    """Requests a second in the closed loop, and added latency at 200 a second."""
    key = "sk-" + os.urandom(12).hex()
    async with start_engine() as engine:
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "config.yaml"
            config.write_text(CONFIG.format(engine=engine, key=key))
            port = _free_port()
            proxy = await asyncio.create_subprocess_exec(
                *(str(VENV / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1"),
                *("--port", str(port), "--num_workers", "1"),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env={**os.environ, "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            )
            try:
                await _listening(port)
                url = f"http://127.0.0.1:{port}"
                closed = await generate_http(url, key, seconds, warm_up_s, in_flight=IN_FLIGHT)
                # Well below what it can do, as 200 a second is for the mesh.
                opened = await generate_http(url, key, seconds, min(warm_up_s, 2.0), rate=50)
            finally:
                proxy.terminate()
                await proxy.wait()
    return {
        "litellm.requests_per_s": round(closed["counted"] / closed["seconds"]),
        "litellm.refused_or_lost": closed["sent"] - closed["answered"],
        "litellm.http_added_ms_p50_at_50_per_s": opened["p50_us"] / 1000,
        "litellm.http_added_ms_p99_at_50_per_s": opened["p99_us"] / 1000,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _listening(port: int) -> None:
    give_up_s = time.monotonic() + START_WAIT_S
    while time.monotonic() < give_up_s:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        await asyncio.sleep(0.2)
    raise RuntimeError(f"the LiteLLM proxy did not listen within {START_WAIT_S:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-up-s", type=float, default=5.0)
    given = parser.parse_args()
    if not (VENV / "bin" / "litellm").exists():
        sys.exit("the LiteLLM proxy is not installed; run: make bench-litellm")
    found = asyncio.run(measure(given.seconds, given.warm_up_s))
    for name, value in found.items():
        print(f"{name:42} {value:>12,}")
    kept: dict[str, Any] = json.loads(RESULTS.read_text())
    kept["figures"] = dict(sorted((kept["figures"] | found).items()))
    render(kept)


if __name__ == "__main__":
    main()
