"""Settings: every mistake at once, with what was expected, found and probably meant."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from waterclock_runtime.config import SettingsLoader, load_settings
from waterclock_runtime.errors import ConfigRefused


class Estimate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    base_us: int = 5


class Rung(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    above: int
    name: str = "rung"


class Tenant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tier: Literal["gold", "standard"] = "standard"
    requests_per_minute: Annotated[int, Meta(ge=1)] = 60
    models: tuple[str, ...] = ()
    api_key: str | None = None


class Scheduler(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lease_ms: Annotated[int, Meta(ge=100)]
    fast: bool = False
    drain_s: float = 1.5
    estimate: Estimate = Estimate()
    spare: Estimate | None = None
    estimates: dict[str, Estimate] = {}
    rungs: tuple[Rung, ...] = ()
    limit: int | None = None
    name: str = "s"

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < self.lease_ms:
            raise ValueError(f"limit of {self.limit} is below lease_ms of {self.lease_ms}")


def loader(tmp_path: Path, text: str = "", environ: dict[str, str] | None = None) -> SettingsLoader:
    file = tmp_path / "waterclock.toml"
    file.write_text(text)
    return SettingsLoader(file=file, environ=environ or {})


def mistakes(loaded: SettingsLoader) -> list[str]:
    with pytest.raises(ConfigRefused) as refused:
        loaded.finish()
    return refused.value.mistakes


def test_a_section_is_read_with_its_defaults(tmp_path: Path) -> None:
    loaded = loader(
        tmp_path,
        """
        [scheduler]
        lease_ms = 500
        drain_s = 3
        rungs = [{ above = 1 }, { above = 2, name = "two" }]
        [scheduler.estimate]
        base_us = 7
        [scheduler.estimates.sim-8b]
        base_us = 9
        """,
    )
    found = loaded.section("scheduler", Scheduler)
    loaded.finish()
    assert found == Scheduler(
        lease_ms=500,
        drain_s=3.0,
        estimate=Estimate(base_us=7),
        estimates={"sim-8b": Estimate(base_us=9)},
        rungs=(Rung(above=1), Rung(above=2, name="two")),
    )


def test_every_mistake_of_every_section_is_named_at_once(tmp_path: Path) -> None:
    loaded = loader(
        tmp_path,
        """
        [scheduler]
        leese_ms = 500
        fast = "yes"
        zzz = 1
        rungs = [{ above = "high" }, { name = "no depth" }]
        [scheduler.estimate]
        base_us = "many"
        [scheduler.estimates.sim-8b]
        bass_us = 1
        [tenants.acme]
        tier = "golden"
        requests_per_minute = 0
        [tenants.globex]
        models = "all"
        """,
    )
    assert loaded.section("scheduler", Scheduler) is None
    assert loaded.section("tenants", dict[str, Tenant]) is None
    known = "drain_s, estimate, estimates, fast, lease_ms, limit, name, rungs, spare"
    assert mistakes(loaded) == [
        "[scheduler] leese_ms: unknown setting; did you mean 'lease_ms'?",
        "[scheduler] fast: expected `bool`, found 'yes'",
        f"[scheduler] zzz: unknown setting; known: {known}",
        "[scheduler] rungs[0] above: expected `int`, found 'high'",
        "[scheduler] rungs[1] above: missing; expected int",
        "[scheduler.estimate] base_us: expected `int`, found 'many'",
        "[scheduler.estimates.sim-8b] bass_us: unknown setting; did you mean 'base_us'?",
        "[scheduler] lease_ms: missing; expected int",
        "[tenants.acme] tier: invalid enum value 'golden', found 'golden'",
        "[tenants.acme] requests_per_minute: expected `int` >= 1, found 0",
        "[tenants.globex] models: expected `array`, found 'all'",
    ]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("scheduler = 5", "[scheduler]: expected a table, found 5"),
        ("[scheduler]\nlease_ms = 1\n", "[scheduler] lease_ms: expected `int` >= 100, found 1"),
        (
            "[scheduler]\nlease_ms = 500\nlimit = 400\n",
            "[scheduler]: limit of 400 is below lease_ms of 500",
        ),
        (
            "[scheduler]\nlease_ms = 500\nestimate = 3\n",
            "[scheduler] estimate: expected a table, found 3",
        ),
        (
            "[scheduler]\nlease_ms = 500\n[scheduler.spare]\nbase = 3\n",
            "[scheduler.spare] base: unknown setting; did you mean 'base_us'?",
        ),
        (
            "[scheduler]\nlease_ms = 500\nestimates = { a = 1 }\n",
            "[scheduler.estimates.a]: expected a table, found 1",
        ),
        ("[scheduler]\nlease_ms = true\n", "[scheduler] lease_ms: expected `int`, found true"),
        ("[scheduler]\nlease_ms = []\n", "[scheduler] lease_ms: expected `int`, found a list"),
    ],
)
def test_a_mistake_says_where_what_was_expected_and_what_was_found(
    tmp_path: Path, text: str, mistake: str
) -> None:
    loaded = loader(tmp_path, text)
    assert loaded.section("scheduler", Scheduler) is None
    assert mistakes(loaded) == [mistake]


def test_what_a_secret_setting_holds_is_not_shown(tmp_path: Path) -> None:
    loaded = loader(tmp_path, "[tenants.acme]\napi_key = 12345\n")
    loaded.section("tenants", dict[str, Tenant])
    (mistake,) = mistakes(loaded)
    assert "12345" not in mistake
    assert "api_key" in mistake


def test_a_mistake_that_two_readers_find_is_named_once(tmp_path: Path) -> None:
    loaded = loader(tmp_path, "[scheduler]\nlease_ms = 1\n")
    loaded.section("scheduler", Scheduler)
    loaded.section("scheduler", Scheduler)
    assert len(mistakes(loaded)) == 1


@pytest.mark.parametrize(
    ("text", "environ", "mistake"),
    [
        ("[tenant.acme]\n", {}, "[tenant]: unknown section; did you mean [tenants]?"),
        ("[admision]\n", {}, "[admision]: unknown section; did you mean [admission]?"),
        (
            "",
            {"WATERCLOCK_SHEDULER__FAST": "true"},
            "WATERCLOCK_SHEDULER__FAST: unknown section; did you mean [scheduler]?",
        ),
    ],
)
def test_a_section_whose_name_is_misspelt_is_a_mistake(
    tmp_path: Path, text: str, environ: dict[str, str], mistake: str
) -> None:
    assert mistakes(loader(tmp_path, text, environ)) == [mistake]


def test_sections_of_others_are_none_of_this_services_business(tmp_path: Path) -> None:
    environ = {"WATERCLOCK_CONFIG": "ignored", "WATERCLOCK_EXTRA": "x", "PATH": "/bin"}
    loader(tmp_path, "[worker]\nanything = 1\n[contracts.x]\n", environ).finish()


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    loaded = loader(
        tmp_path,
        "[scheduler]\nlease_ms = 500\nname = 'file'\n[scheduler.estimates.Sim-8b]\nbase_us = 1\n",
        {
            "WATERCLOCK_SCHEDULER__LEASE_MS": "700",
            "WATERCLOCK_SCHEDULER__FAST": "true",
            "WATERCLOCK_SCHEDULER__NAME": "17",
            "WATERCLOCK_SCHEDULER__LIMIT": "900",
            "WATERCLOCK_SCHEDULER__DRAIN_S": "2",
            "WATERCLOCK_SCHEDULER__ESTIMATE__BASE_US": "8",
            "WATERCLOCK_SCHEDULER__SPARE__BASE_US": "6",
            "WATERCLOCK_SCHEDULER__ESTIMATES__SIM_8B__BASE_US": "2",
            "WATERCLOCK_SCHEDULER__ESTIMATES__OTHER__BASE_US": "3",
            "WATERCLOCK_SCHEDULER__RUNGS": '[{ above = 4, name = "r" }]',
        },
    )
    found = loaded.section("scheduler", Scheduler)
    loaded.finish()
    assert found == Scheduler(
        lease_ms=700,
        fast=True,
        # A string field takes the text as it is, whatever it looks like.
        name="17",
        limit=900,
        drain_s=2.0,
        estimate=Estimate(base_us=8),
        spare=Estimate(base_us=6),
        estimates={"Sim-8b": Estimate(base_us=2), "other": Estimate(base_us=3)},
        rungs=(Rung(above=4, name="r"),),
    )


def test_tables_of_named_things_come_from_the_environment_alone_too(tmp_path: Path) -> None:
    loaded = loader(
        tmp_path,
        "",
        {
            "WATERCLOCK_TENANTS__ACME__TIER": "gold",
            "WATERCLOCK_TENANTS__ACME__MODELS": '["a", "b"]',
            "WATERCLOCK_TENANTS__ACME__API_KEY": "true",
        },
    )
    found = loaded.section("tenants", dict[str, Tenant])
    loaded.finish()
    assert found == {"acme": Tenant(tier="gold", models=("a", "b"), api_key="true")}


@pytest.mark.parametrize(
    ("variable", "text", "mistake"),
    [
        (
            "WATERCLOCK_SCHEDULER__LEASE_MS",
            "soon",
            "[scheduler] lease_ms: expected `int`, found 'soon'",
        ),
        (
            "WATERCLOCK_SCHEDULER__LEESE_MS",
            "500",
            "[scheduler] leese_ms: unknown setting; did you mean 'lease_ms'?",
        ),
        (
            "WATERCLOCK_SCHEDULER____LEASE_MS",
            "500",
            "WATERCLOCK_SCHEDULER____LEASE_MS: a name between two `__` is empty",
        ),
    ],
)
def test_a_mistake_in_the_environment_is_named_like_one_in_the_file(
    tmp_path: Path, variable: str, text: str, mistake: str
) -> None:
    loaded = loader(tmp_path, "[scheduler]\nlease_ms = 500\n", {variable: text})
    loaded.section("scheduler", Scheduler)
    assert mistakes(loaded) == [mistake]


def test_the_file_is_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text("[scheduler]\nlease_ms = 900\n")
    environ = {"WATERCLOCK_CONFIG": str(file)}
    assert load_settings(Scheduler, section="scheduler", environ=environ).lease_ms == 900


@pytest.mark.parametrize(
    ("content", "mistake"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"[scheduler\n", "not TOML: "),
        (b"\xff\xfe", "not TOML: "),
    ],
)
def test_a_file_that_is_none_is_a_mistake_beside_the_others(
    tmp_path: Path, content: bytes | None, mistake: str
) -> None:
    file = tmp_path / "waterclock.toml"
    if content is not None:
        file.write_bytes(content)
    loaded = SettingsLoader(file=file, environ={})
    loaded.section("scheduler", Scheduler)
    first, second = mistakes(loaded)
    assert mistake in first
    assert str(file) in first
    assert second == "[scheduler] lease_ms: missing; expected int"


_KEYS = st.sampled_from(["lease_ms", "fast", "estimate", "estimates", "rungs", "base_us", "above"])
_TOML = st.recursive(
    st.integers(-5, 5) | st.booleans() | st.text("ab", max_size=2) | st.floats(0, 1),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(table=st.dictionaries(_KEYS, _TOML, max_size=5))
def test_whatever_stands_in_a_section_is_read_or_named(table: dict[str, Any]) -> None:
    loaded = SettingsLoader(environ={})
    loaded._table = {"scheduler": table}
    found = loaded.section("scheduler", Scheduler)
    assert (found is None) == bool(loaded.mistakes)
    assert all(mistake.startswith("[scheduler") for mistake in loaded.mistakes)
