"""The command line: what is refused, and that the refusal says all that it has to say."""

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console

from waterclock import app as command
from waterclock.doctor import Finding, configuration, show
from waterclock.mesh import EmbeddedMesh, MeshError, MeshOptions

GOOD = """
[tenants.acme]
[models.sim-8b]
[pools.en]
models = ["sim-8b"]
default = true
[workers.en-1]
pool = "en"
models = ["sim-8b"]
"""


def run(monkeypatch: pytest.MonkeyPatch, *argv: str) -> tuple[int, str]:
    """Exit status and what was said on standard error."""
    said = io.StringIO()
    monkeypatch.setattr(command, "errors", Console(file=said, width=60))
    with pytest.raises(SystemExit) as ended:
        command.app(argv)
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.getvalue()


def test_a_dash_is_a_prompt_and_no_option() -> None:
    _, bound, _ = command.app.parse_args(["send", "-", "--tenant", "acme"])
    assert bound.args == ("-",)
    assert bound.arguments["tenant"] == "acme"


def test_brackets_and_colons_in_an_error_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "mesh.toml"
    config.write_text('[tenants.acme]\ntier = ":x:"\n')
    status, said = run(
        monkeypatch, "up", "--data", str(tmp_path / "data:x:"), "--config", str(config)
    )
    assert status == 1
    assert "[workers]: expected at least one [workers.<name>]" in said
    status, said = run(monkeypatch, "key", "[red]", "--data", str(tmp_path / "none:x:"))
    assert status == 1
    assert str(tmp_path / "none:x:") in said


def test_the_doctor_shows_brackets_too() -> None:
    said = io.StringIO()
    finding = Finding("configuration", False, "[http] port: 99999 :x:", "mend [http]")
    assert not show([finding], Console(file=said, width=100))
    assert "[http] port: 99999 :x:" in said.getvalue()
    assert "mend [http]" in said.getvalue()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[tenants.acme\n", "Expected ']'"),
        ("tenants = 5\n" + GOOD.replace("[tenants.acme]", ""), "[tenants]: expected a table"),
        ("workers = 3\n", "[workers]: expected"),
        ("[workers]\nx = 3\n", "[workers.x]: expected a table"),
        (GOOD + '[tenants."b c"]\n', "[tenants.b c]: expected a name"),
        (GOOD + "[schedulr]\n", "[schedulr]: unknown section; did you mean [scheduler]?"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    config = tmp_path / "mesh.toml"
    config.write_text(text)
    finding = configuration(config)
    assert not finding.ok
    assert expected in finding.found


def test_all_mistakes_are_named_at_once_whoever_reads_the_section(tmp_path: Path) -> None:
    config = tmp_path / "mesh.toml"
    config.write_text(
        GOOD.replace("default = true", 'policy = "none"')
        + "slots = 0\n[scheduler]\nlease_ms = 1\n[http]\nport = 99999\n"
    )
    found = configuration(config).found
    for section in ("[pools.en] policy", "slots", "[scheduler] lease_ms", "[http] port"):
        assert section in found


@pytest.mark.parametrize("name", ["w w", "../out", "admission", "nats", "secrets"])
def test_a_worker_takes_no_other_ones_folder(tmp_path: Path, name: str) -> None:
    config = tmp_path / "mesh.toml"
    config.write_text(GOOD.replace("[workers.en-1]", f'[workers."{name}"]'))
    mesh = EmbeddedMesh(MeshOptions(data_dir=tmp_path / "data", config=config))
    with pytest.raises(MeshError, match="letters, digits"):
        asyncio.run(mesh.start())
    assert not (tmp_path / "data" / name).exists() or name == "secrets"


def test_a_mesh_that_is_refused_leaves_the_other_ones_folder_alone(tmp_path: Path) -> None:
    config = tmp_path / "mesh.toml"
    config.write_text(GOOD)
    options = MeshOptions(data_dir=tmp_path / "data", config=config)
    first, second = EmbeddedMesh(options), EmbeddedMesh(options)
    first.prepare()
    try:
        with pytest.raises(MeshError, match="another mesh runs"):
            asyncio.run(second.start())
        assert (tmp_path / "data" / "up.json").exists()
    finally:
        asyncio.run(first.stop())


def test_who_wants_an_answer_is_told_at_once_that_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "mesh.toml"
    config.write_text(GOOD)
    mesh = EmbeddedMesh(MeshOptions(data_dir=tmp_path / "data", config=config))
    mesh.prepare()
    assert mesh.running_pid() is not None
    asyncio.run(mesh.stop())
    assert mesh.running_pid() is None
    (tmp_path / "data" / "waterclock.toml").write_text(GOOD)
    for argv in (("send", "hello"), ("load", "--seconds", "1")):
        status, said = run(monkeypatch, *argv, "--data", str(tmp_path / "data"))
        assert status == 1
        assert "does not run: `waterclock up` starts it" in said


@pytest.mark.parametrize("argv", [("--port", "65536"), ("--http-port", "-1")])
def test_a_port_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, str]
) -> None:
    status, _ = run(monkeypatch, "up", "--data", str(tmp_path), *argv)
    assert status == 2
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_an_error_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    status, said = run(monkeypatch, "up", "--data", str(tmp_path / "file"))
    assert status == 1
    assert "File exists" in said
