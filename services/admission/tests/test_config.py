"""Settings, and the mistakes in them."""

import hashlib
from pathlib import Path

import pytest

from waterclock_admission.config import contract_sha256, read_config
from waterclock_runtime.config import SettingsLoader

GOOD = """
[tenants.acme]
tier = "gold"
api_key_sha256 = ["{key}"]
requests_per_minute = 60
models = ["b", "a"]
[tenants.globex]
deadline_ms = 5000
[models.a]
context_tokens = 100
output_tokens_default = 10
output_tokens_max = 50
[pools.zh]
models = ["a"]
languages = ["zh"]
policy = "sjf"
[pools.en]
models = ["a", "b"]
default = true
[scheduler]
anything = 1
"""
ONE_KEY = '[tenants.{}]\napi_key_sha256=["{{key}}"]\n'
KEY = hashlib.sha256(b"key").hexdigest()


def loaded(tmp_path: Path, text: str, environ: dict[str, str] | None = None):
    file = tmp_path / "waterclock.toml"
    file.write_text(text.replace("{key}", KEY), encoding="utf-8")
    loader = SettingsLoader(file=file, environ=environ or {})
    return read_config(loader), loader.mistakes


def test_what_was_agreed_becomes_terms(tmp_path: Path) -> None:
    config, mistakes = loaded(tmp_path, GOOD)
    assert mistakes == []
    assert config is not None
    acme, globex = config.terms["acme"], config.terms["globex"]
    assert (acme.tier, acme.model_default, acme.requests_per_minute) == ("gold", "b", 60)
    assert acme.limited
    assert (globex.tier, globex.model_default, globex.deadline_ms_default) == (
        "standard",
        "a",
        5000,
    )
    assert not globex.limited
    assert acme.models["a"].pools == ("zh", "en")
    assert acme.models["a"].output_tokens_max == 50
    assert acme.models["b"].context_tokens == 32_768


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    config, mistakes = loaded(
        tmp_path,
        GOOD,
        {"WATERCLOCK_ADMISSION__REDIS_URL": "redis://x", "WATERCLOCK_HTTP__PORT": "9"},
    )
    assert mistakes == []
    assert config is not None
    assert (config.admission.redis_url, config.http.port) == ("redis://x", 9)


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ('[tenants.acme]\ntear = "gold"\n[pools.p]\nmodels=["m"]', "did you mean 'tier'?"),
        ("[tenants.acme]", "no model at all"),
        ('[tenants.acme]\nmodels=["x"]\n[pools.p]\nmodels=["m"]', "known: ['m']"),
        ('[tenants."a b"]\n[pools.p]\nmodels=["m"]', "expected a name"),
        (
            f"{ONE_KEY.format('a')}{ONE_KEY.format('b')}[pools.p]\nmodels=['m']",
            "a key names one tenant",
        ),
        ('[tenants.a]\napi_key_sha256=["key"]\n[pools.p]\nmodels=["m"]', "api_key_sha256"),
        ('[tenants.a]\nrequests_per_minute=0\n[pools.p]\nmodels=["m"]', "requests_per_minute"),
        ('[tenants.a]\ndeadline_ms=99999999999\n[pools.p]\nmodels=["m"]', "deadline_ms"),
        ('[models.x]\n[pools.p]\nmodels=["m"]', "nothing could run it"),
        ('[models.m]\noutput_tokens_default=9000\n[pools.p]\nmodels=["m"]', "output_tokens_max"),
        ("[http]\nport=70000\n[pools.p]\nmodels=['m']", "port"),
        ("[admission]\nredis='x'\n[pools.p]\nmodels=['m']", "did you mean"),
        ("[pools.p]\nmodels='m'", "[pools.p]"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, mistake: str) -> None:
    config, mistakes = loaded(tmp_path, text)
    assert config is None
    assert any(mistake in found for found in mistakes), mistakes


def test_a_contract_is_what_was_agreed_and_not_the_keys(tmp_path: Path) -> None:
    config, _ = loaded(tmp_path, GOOD)
    other, _ = loaded(tmp_path, GOOD.replace("{key}", "0" * 64))
    changed, _ = loaded(tmp_path, GOOD.replace("60", "61"))
    assert config is not None
    assert other is not None
    assert changed is not None
    sha256 = config.terms["acme"].contract_sha256
    assert sha256 == contract_sha256("acme", config.tenants["acme"])
    assert other.terms["acme"].contract_sha256 == sha256
    assert changed.terms["acme"].contract_sha256 != sha256
    assert config.terms["globex"].contract_sha256 != sha256
