"""An embedded mesh that tests break on purpose: small, quick, and it remembers what was done to it.

The processes, the bus and the cache are the real ones of ``waterclock.mesh``; only the engines
are simulated. Every configuration here is written out, so that a test says what it runs on.
"""

import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from waterclock.mesh import Access, EmbeddedMesh, MeshOptions, TenantAccess
from waterclock_proto.flows import SERVICES
from waterclock_runtime.clock import SIMULATED_STEP_VARIABLE

MODEL = "sim-8b"
TENANTS = ("acme", "globex", "initech")

Table = Mapping[str, Any]

LEASE_MS = 2_000
NO_LADDER: Table = {
    "batch_cap_above": 2_000,
    "batch_cap_below": 1_000,
    "speculation_off_above": 4_000,
    "speculation_off_below": 2_000,
    "refuse_above": 8_000,
    "refuse_below": 4_000,
}
"""Thresholds that no test reaches: what waits while something is down is not shed."""


def tenant(tier: str = "standard", **settings: Any) -> Table:
    """A tenant whose budgets are kept and never reached, unless ``settings`` says otherwise."""
    ample = {"requests_per_minute": 1_000_000, "tokens_per_minute": 100_000_000}
    return {"tier": tier, "concurrency": 100_000} | ample | settings


def worker(pool: str, slots: int = 16, **settings: Any) -> Table:
    """A worker whose engine takes a tenth of the time that the GPU of its profile would."""
    return {
        "pool": pool,
        "models": [MODEL],
        "profile": "h200-8b",
        "speed_permille": 10_000,
        "slots": slots,
        "drain_s": 6.0,
    } | settings


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """What a mesh is made of; the defaults are two pools of one worker each and three tenants."""

    tenants: Mapping[str, Table] = field(
        default_factory=lambda: {
            "acme": tenant("gold"),
            "globex": tenant(),
            "initech": tenant(),
        }
    )
    pools: Mapping[str, Table] = field(
        default_factory=lambda: {
            "zh": {"models": [MODEL], "languages": ["zh"], "policy": "edf"},
            "en": {
                "models": [MODEL],
                "languages": ["en", "other"],
                "policy": "edf",
                "default": True,
            },
        }
    )
    workers: Mapping[str, Table] = field(
        default_factory=lambda: {"zh-1": worker("zh"), "en-1": worker("en")}
    )
    models: Mapping[str, Table] = field(
        default_factory=lambda: {MODEL: {"output_tokens_default": 16, "output_tokens_max": 4096}}
    )
    sections: Mapping[str, Table] = field(
        default_factory=lambda: {"scheduler": {"lease_ms": LEASE_MS}, "ladder": NO_LADDER}
    )
    """All else: ``[scheduler]``, ``[ladder]``, ``[admission]``, ``[http]``, ``[ledger]``."""

    def toml(self, access: Access) -> str:
        """The configuration file, with the hashes of the tenants' keys in it."""
        lines: list[str] = []
        for name, table in self.sections.items():
            lines += _table(name, table)
        for name, table in self.tenants.items():
            key = access.tenants[name].api_key
            digest = hashlib.sha256(key.encode()).hexdigest()
            lines += _table(f"tenants.{name}", {**table, "api_key_sha256": [digest]})
        for kind, tables in (
            ("models", self.models),
            ("pools", self.pools),
            ("workers", self.workers),
        ):
            for name, table in tables.items():
                lines += _table(f"{kind}.{name}", table)
        return "\n".join(lines) + "\n"


class DrillMesh(EmbeddedMesh):
    """``EmbeddedMesh`` that knows which children were killed, and whose clocks can be stepped."""

    def __init__(self, options: MeshOptions) -> None:
        super().__init__(options)
        self.killed: set[str] = set()
        """Children that were killed at least once."""
        self.pids: set[int] = set()
        """Every process that was ever seen running."""

    def prepare(self) -> None:
        super().prepare()
        steps = self.data_dir / "steps"
        steps.mkdir(exist_ok=True)
        for name in self.services:
            self.children[name].environ[SIMULATED_STEP_VARIABLE] = str(steps / name)

    def kill(self, name: str) -> None:
        self.killed.add(name)
        self.pids.add(self.children[name].pid)
        super().kill(name)

    def step_clock(self, name: str, step_us: int) -> None:
        """From now on the wall clock of one service is so far from this host's."""
        path = self.data_dir / "steps" / name
        beside = path.with_suffix(".new")
        beside.write_text(str(step_us))
        beside.replace(path)

    def slots(self, name: str) -> int:
        """How many requests a worker may have at once."""
        return int(self.config["workers"][name]["slots"])

    def logs(self, name: str) -> str:
        path = self.children[name].log_file if name in self.children else None
        path = path or self.data_dir / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""


def make_mesh(folder: Path, plan: MeshPlan | None = None, **options: Any) -> DrillMesh:
    """A mesh in ``folder``, which has not been started yet."""
    plan = plan or MeshPlan()
    folder.mkdir(parents=True, exist_ok=True)
    access = Access(
        services={name: secrets.token_urlsafe(12) for name in (*SERVICES, "operator")},
        tenants={
            name: TenantAccess(
                password=secrets.token_urlsafe(12), api_key=f"wc-{secrets.token_urlsafe(12)}"
            )
            for name in plan.tenants
        },
        mesh_key=secrets.token_hex(32),
    )
    (folder / "secrets").mkdir(mode=0o700, exist_ok=True)
    (folder / "secrets" / "access.json").write_bytes(msgspec.json.encode(access))
    config = folder / "waterclock.toml"
    config.write_text(plan.toml(access), encoding="utf-8")
    return DrillMesh(MeshOptions(data_dir=folder, config=config, **options))


def processes_of(folder: Path) -> dict[int, str]:
    """Processes of this user, other than this one, that work in ``folder``, with what they run."""
    found: dict[int, str] = {}
    wanted = str(folder).encode()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            line = (process / "cmdline").read_bytes()
            environ = (process / "environ").read_bytes()
        except OSError:
            continue
        if line and (wanted in line or wanted in environ):
            found[int(process.name)] = line.replace(b"\0", b" ").decode(errors="replace")
    return found


def _table(name: str, table: Table) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"[{name}]", *(f"{key} = {_value(value)}" for key, value in plain.items())]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += _table(f"{name}.{key}", value)
    return lines


def _value(value: object) -> str:
    # What TOML and JSON write alike: strings, integers, decimals, booleans and lists of them.
    return msgspec.json.encode(value).decode()
