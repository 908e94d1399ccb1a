"""Settings and what is wrong with them."""

from pathlib import Path

import pytest

from waterclock_runtime.config import SettingsLoader
from waterclock_scheduler.__main__ import check, settings_of
from waterclock_scheduler.config import LadderSettings, PoolSettings, mistakes_of

GOOD = """
[scheduler]
tiers = ["gold", "silver"]
lease_ms = 5000
[scheduler.estimate]
output_us_per_token = 3000
[scheduler.estimates."sim-8b"]
output_us_per_token = 1000
[pools.zh]
languages = ["zh"]
models = ["sim-8b"]
policy = "edf"
tiers_first = true
[pools.rest]
models = ["sim-8b"]
default = true
[ladder]
batch_cap = 2
"""


def load(tmp_path: Path, text: str) -> SettingsLoader:
    file = tmp_path / "waterclock.toml"
    file.write_text(text)
    return SettingsLoader(file=file, environ={})


def test_a_whole_configuration(tmp_path: Path) -> None:
    loader = load(tmp_path, GOOD)
    settings = settings_of(loader)
    loader.finish()
    assert settings is not None
    assert settings.scheduler.tiers == ("gold", "silver")
    assert list(settings.pools) == ["zh", "rest"]
    assert settings.pools["zh"].policy == "edf"
    assert settings.ladder.batch_cap == 2
    assert settings.estimate("sim-8b").output_us_per_token == 1000
    assert settings.estimate("else").output_us_per_token == 3000


def test_without_a_word_there_is_one_pool_for_everything(tmp_path: Path) -> None:
    loader = load(tmp_path, "")
    settings = settings_of(loader)
    loader.finish()
    assert settings is not None
    assert settings.pools == {"default": PoolSettings(default=True)}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param("[scheduler]\nlease_ms = 600", "lease_ms", id="a lease of two beats"),
        pytest.param("[scheduler]\nleese_ms = 3000", "did you mean 'lease_ms'", id="a typo"),
        pytest.param('[pools.a]\npolicy = "lifo"', "policy", id="an unknown policy"),
        pytest.param("[pools.a]", "default = true", id="no default pool"),
        pytest.param(
            "[pools.a]\ndefault = true\n[pools.b]\ndefault = true", "already", id="two defaults"
        ),
        pytest.param('[pools."a b"]\ndefault = true', "a b", id="a name that is no subject token"),
        pytest.param(
            '[pools.a]\nmodels = ["m"]\ndefault = true\n[pools.b]\nmodels = ["n"]',
            "'n' has no default pool",
            id="a model without a default pool",
        ),
        pytest.param("[ladder]\nrefuse_below = 15", "refuse_below", id="no hysteresis"),
        pytest.param("[ladder]\nrefuse_above = 9\nrefuse_below = 1", "expected", id="turned round"),
        pytest.param("[ladder]\nretry_after_ms_max = 1", "retry_after_ms_min", id="bounds crossed"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, found: str) -> None:
    loader = load(tmp_path, text)
    check(loader)
    assert any(found in mistake for mistake in loader.mistakes), loader.mistakes


def test_one_default_for_each_model_is_no_mistake() -> None:
    assert (
        mistakes_of(
            {
                "a": PoolSettings(models=("m",), default=True),
                "b": PoolSettings(models=("n",), default=True),
                "c": PoolSettings(models=("m", "n")),
            }
        )
        == []
    )
    assert LadderSettings().refuse_above == 15
