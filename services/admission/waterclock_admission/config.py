"""Admission's settings: what it reads of the mesh's one file, and how it becomes terms."""

import hashlib
import json
import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from waterclock_admission import limits
from waterclock_admission.core import ModelTerms, Terms
from waterclock_proto.names import NAME_PATTERN, Label, PositiveMs, Sha256
from waterclock_proto.subjects import BODY_BYTES_MAX, DEADLINE_S_MAX
from waterclock_runtime.config import SettingsLoader

PerMinute = Annotated[int, Meta(ge=1, le=limits.PER_MINUTE_MAX)]
Tokens = Annotated[int, Meta(ge=1, le=10_000_000)]
Positive = Annotated[int, Meta(ge=1, le=10**9)]


class AdmissionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[admission]``."""

    redis_url: str = ""
    """``redis://host:port/0`` of a Redis or Valkey; empty: budgets live in this process only."""
    redis_prefix: str = "waterclock"
    deadline_ms: PositiveMs = 60_000
    """For tenants that name none of their own."""
    open_requests_max: Positive = limits.OPEN_REQUESTS_MAX
    ended_requests_max: Positive = limits.ENDED_REQUESTS_MAX
    snapshot_s: Positive = limits.SNAPSHOT_S
    malformed_events_per_s: Positive = limits.MALFORMED_EVENTS_PER_S


class TenantSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[tenants.<name>]``; its contract is all of this but the keys."""

    tier: Label = "standard"
    api_key_sha256: tuple[Sha256, ...] = ()
    """SHA-256 (hex) of each API key of the HTTP edge; the keys themselves are nowhere."""
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    """Prompt and longest possible answer of what is admitted."""
    concurrency: Positive | None = None
    """Requests on their way at once."""
    deadline_ms: PositiveMs | None = None
    """For requests that name none."""
    models: tuple[Label, ...] = ()
    """Which it may use; the first is its default. Empty: all."""


class ModelSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[models.<name>]``."""

    context_tokens: Tokens = 32_768
    """Prompt and answer together."""
    output_tokens_default: Tokens = 512
    output_tokens_max: Tokens = 8_192


class HttpSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[http]``: the OpenAI-compatible edge."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8080
    """0: any free port, written to ``<data_dir>/admission/http-port``."""
    body_bytes_max: Annotated[int, Meta(ge=1024, le=BODY_BYTES_MAX)] = BODY_BYTES_MAX
    connections_max: Positive = 4_096
    header_bytes_max: Positive = 32_768
    header_wait_ms: Positive = 10_000
    """For a connection's request line and headers, from the first byte that could be one."""
    body_wait_ms: Positive = 30_000
    idle_s: Positive = 75
    """A connection kept open without a request; longer than most load balancers keep theirs."""
    receipt_wait_ms: Positive = 10_000
    """For admission's decision; after that the client is told to come again."""
    stream_bytes_max: Positive = 262_144
    """What is kept for a client that does not read its stream; beyond it, it is cut off."""
    stall_ms: Positive = 15_000
    """A client that takes nothing for so long is cut off."""


class PoolView(Struct, frozen=True, kw_only=True):
    """What admission needs of ``[pools.<name>]``; the rest is the scheduler's."""

    models: tuple[Label, ...] = ()


class AdmissionConfig(Struct, frozen=True, kw_only=True):
    """All of it, checked."""

    admission: AdmissionSettings
    http: HttpSettings
    tenants: dict[str, TenantSettings]
    terms: dict[str, Terms]


def read_config(loader: SettingsLoader) -> AdmissionConfig | None:
    """All sections, or None with every mistake noted in ``loader``."""
    admission = loader.section("admission", AdmissionSettings)
    http = loader.section("http", HttpSettings)
    tenants = loader.section("tenants", dict[str, TenantSettings])
    models = loader.section("models", dict[str, ModelSettings])
    pools = _read_pools(loader)
    if admission is None or http is None or tenants is None or models is None or pools is None:
        return None
    before = len(loader.mistakes)
    _check_tenants(loader, tenants, admission)
    terms_by_model = _model_terms(loader, models, pools)
    terms: dict[str, Terms] = {}
    for name, tenant in tenants.items():
        unknown = [model for model in tenant.models if model not in terms_by_model]
        if unknown:
            loader.mistake(
                f"[tenants.{name}] models: {unknown} are in no [pools.*] models and no [models.*];"
                f" known: {sorted(terms_by_model)}"
            )
            continue
        chosen = tenant.models or tuple(terms_by_model)
        if not chosen:
            continue
        terms[name] = Terms(
            tenant=name,
            tier=tenant.tier,
            contract_sha256=contract_sha256(name, tenant),
            models={model: terms_by_model[model] for model in chosen},
            model_default=chosen[0],
            deadline_ms_default=tenant.deadline_ms or admission.deadline_ms,
            requests_per_minute=tenant.requests_per_minute or 0,
            tokens_per_minute=tenant.tokens_per_minute or 0,
            concurrency=tenant.concurrency or 0,
        )
    if len(loader.mistakes) > before:
        return None
    return AdmissionConfig(admission=admission, http=http, tenants=tenants, terms=terms)


def contract_sha256(name: str, tenant: TenantSettings) -> str:
    """SHA-256 of the contract: canonical JSON (RFC 8785) of the tenant's settings without its keys.

    The settings hold integers and strings only, for which sorted keys and no spaces are canonical.
    """
    contract: dict[str, Any] = {
        field: value
        for field, value in msgspec.structs.asdict(tenant).items()
        if field != "api_key_sha256"
    }
    contract["tenant"] = name
    text = json.dumps(contract, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_pools(loader: SettingsLoader) -> dict[str, PoolView] | None:
    found = loader.section("pools", dict[str, dict[str, Any]])
    if found is None:
        return None
    pools: dict[str, PoolView] = {}
    for name, table in found.items():
        try:
            pools[name] = msgspec.convert(table, PoolView)
        except msgspec.ValidationError as error:
            loader.mistake(f"[pools.{name}]: {error}")
    return pools


def _model_terms(
    loader: SettingsLoader, models: dict[str, ModelSettings], pools: dict[str, PoolView]
) -> dict[str, ModelTerms]:
    """Every model that a pool has or a section describes, those of the pools first."""
    names = list(dict.fromkeys([*(m for pool in pools.values() for m in pool.models), *models]))
    if not names:
        loader.mistake(
            "[pools.*] models: no model at all; name one in a pool or in [models.<name>]"
        )
    terms: dict[str, ModelTerms] = {}
    for name in names:
        settings = models.get(name, ModelSettings())
        homes = tuple(pool for pool, view in pools.items() if name in view.models)
        if pools and not homes:
            loader.mistake(f"[models.{name}]: in no [pools.*] models, so nothing could run it")
        if settings.output_tokens_default > settings.output_tokens_max:
            loader.mistake(
                f"[models.{name}] output_tokens_default: {settings.output_tokens_default}, at most"
                f" output_tokens_max = {settings.output_tokens_max} expected"
            )
        terms[name] = ModelTerms(
            name=name,
            context_tokens=settings.context_tokens,
            output_tokens_default=settings.output_tokens_default,
            output_tokens_max=settings.output_tokens_max,
            pools=homes,
        )
    return terms


def _check_tenants(
    loader: SettingsLoader, tenants: dict[str, TenantSettings], admission: AdmissionSettings
) -> None:
    owners: dict[str, str] = {}
    for name, tenant in tenants.items():
        if not re.match(NAME_PATTERN, name):
            loader.mistake(f"[tenants.{name}]: expected a name of 1 to 64 letters, digits, _ and -")
        deadline_ms = tenant.deadline_ms or admission.deadline_ms
        if deadline_ms > DEADLINE_S_MAX * 1000:
            loader.mistake(
                f"[tenants.{name}] deadline_ms: {deadline_ms}, at most {DEADLINE_S_MAX * 1000}"
            )
        for key in tenant.api_key_sha256:
            if owners.setdefault(key, name) != name:
                loader.mistake(
                    f"[tenants.{name}] api_key_sha256: {key[:8]}… is also tenant {owners[key]!r}'s;"
                    " a key names one tenant"
                )
