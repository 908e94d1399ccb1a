"""The configuration reference says what the settings are."""

from pathlib import Path

from waterclock.reference import reference

ROOT = Path(__file__).parents[2]


def test_the_reference_is_up_to_date() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == reference(), "run: python -m waterclock.reference"


def test_every_section_of_the_default_configuration_is_in_the_reference() -> None:
    text = (ROOT / "cli" / "waterclock" / "default.toml").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("["):
            section = line.partition("]")[0].strip("[").partition(".")[0]
            assert f"`[{section}" in reference()
