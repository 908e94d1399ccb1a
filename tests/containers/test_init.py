"""``waterclock.init``: made once, kept, and readable to nobody else."""

import hashlib
import json
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker_process import nats_server_binary
from waterclock.init import complete, main, prepare, show, with_additions
from waterclock.mesh import Access, MeshError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """# ours
[bus]
events_bytes_max = 1000
requests_bytes_max = 2000
answers_bytes_max = 500

[tenants.acme]            # the VIP
tier = "gold"

[tenants.globex]
"""


class Folders:
    def __init__(self, root: Path) -> None:
        self.dir = root / "access"
        self.store = root / "store"
        self.config = root / "waterclock.toml"
        self.config.write_text(CONFIG)

    def prepare(self, **more: Any) -> str:
        return prepare(self.dir, self.config, store=self.store, **more)

    def access(self) -> Access:
        return msgspec.json.decode((self.dir / "access.json").read_bytes(), type=Access)

    def bus(self) -> dict[str, Any]:
        return json.loads((self.dir / "nats" / "nats.conf").read_text())

    def service(self, name: str) -> dict[str, Any]:
        return tomllib.loads((self.dir / name / "waterclock.toml").read_text())


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


def test_each_service_gets_its_own_password_and_nobody_elses(folders: Folders) -> None:
    folders.prepare()
    access = folders.access()
    users = {user["user"]: user for user in folders.bus()["accounts"]["MESH"]["users"]}
    for name in ("admission", "scheduler", "worker", "ledger"):
        file = folders.dir / name / "waterclock.toml"
        text = file.read_text()
        config = tomllib.loads(text)
        assert config["bus"]["user"] == name
        assert config["bus"]["password"] == access.services[name] == users[name]["password"]
        assert config["bus"]["events_bytes_max"] == 1000
        assert config["service"] == {"mesh_key": access.mesh_key}
        assert len(bytes.fromhex(access.mesh_key)) == 32
        others = {*access.services.values()} - {access.services[name]}
        others |= {tenant.password for tenant in access.tenants.values()}
        others |= {tenant.api_key for tenant in access.tenants.values()}
        assert [secret for secret in others if secret in text] == []
        assert text.startswith("# ours\n")


def test_only_admission_gets_the_hashes_of_api_keys(folders: Folders) -> None:
    folders.prepare()
    for tenant, secret in folders.access().tenants.items():
        digest = hashlib.sha256(secret.api_key.encode()).hexdigest()
        assert folders.service("admission")["tenants"][tenant]["api_key_sha256"] == [digest]
        assert "api_key_sha256" not in folders.service("worker")["tenants"][tenant]


def test_nobody_else_can_read_anything(folders: Folders) -> None:
    folders.prepare()
    files = [path for path in folders.dir.rglob("*") if path.is_file()]
    assert len(files) == 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    inner = [path for path in folders.dir.iterdir() if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in inner} == {0o700}


def test_what_exists_is_kept_to_the_byte(folders: Folders) -> None:
    folders.prepare()
    before = {path: path.read_bytes() for path in folders.dir.rglob("*") if path.is_file()}
    said = folders.prepare()
    after = {path: path.read_bytes() for path in folders.dir.rglob("*") if path.is_file()}
    assert after == before
    assert "secrets of acme, globex: kept" in said
    assert "made" not in said


def test_a_new_tenant_gets_secrets_and_the_others_keep_theirs(folders: Folders) -> None:
    folders.prepare()
    before = folders.access()
    folders.config.write_text(f"{CONFIG}\n[tenants.initech]\n")
    said = folders.prepare()
    after = folders.access()
    assert "secrets of initech: made" in said
    assert after.mesh_key == before.mesh_key
    assert after.services == before.services
    assert {name: after.tenants[name] for name in before.tenants} == before.tenants
    assert "T_initech" in folders.bus()["accounts"]


def test_a_tenant_that_is_gone_cannot_get_in_and_comes_back_the_same(folders: Folders) -> None:
    folders.prepare()
    globex = folders.access().tenants["globex"]
    folders.config.write_text(CONFIG.partition("[tenants.globex]")[0])
    folders.prepare()
    assert "T_globex" not in folders.bus()["accounts"]
    folders.config.write_text(CONFIG)
    folders.prepare()
    assert folders.access().tenants["globex"] == globex


def test_renewing_changes_one_and_only_one(folders: Folders) -> None:
    folders.prepare()
    before = folders.access()
    folders.prepare(renew=["acme"])
    after = folders.access()
    assert after.tenants["acme"].password != before.tenants["acme"].password
    assert after.tenants["acme"].api_key != before.tenants["acme"].api_key
    assert after.tenants["globex"] == before.tenants["globex"]
    assert (after.services, after.mesh_key) == (before.services, before.mesh_key)


def test_a_key_that_the_operator_made_counts_alone(folders: Folders) -> None:
    own = hashlib.sha256(b"own").hexdigest()
    folders.config.write_text(f'{CONFIG}api_key_sha256 = ["{own}"]\n')
    folders.prepare()
    assert folders.service("admission")["tenants"]["globex"]["api_key_sha256"] == [own]
    assert "api_key" not in json.loads(show(folders.dir, folders.config, "globex"))
    assert "api_key" in json.loads(show(folders.dir, folders.config, "acme"))


def test_the_bus_may_store_as_much_as_the_streams_and_tells_only_itself(folders: Folders) -> None:
    folders.prepare(sync_interval="always")
    bus = folders.bus()
    assert bus["jetstream"] == {
        "store_dir": str(folders.store),
        "sync_interval": "always",
        "max_file_store": 3500,
    }
    assert bus["http"] == "127.0.0.1:8222"
    assert "http_port" not in bus


def test_the_server_accepts_its_configuration(folders: Folders) -> None:
    folders.prepare()
    file = folders.dir / "nats" / "nats.conf"
    tested = subprocess.run(
        [nats_server_binary(), "-t", "-c", file], capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stderr


def test_streams_larger_than_the_disk_are_warned_of(folders: Folders) -> None:
    folders.store.mkdir()
    assert "warning" not in folders.prepare()
    folders.config.write_text(CONFIG.replace("= 1000", "= 1_000_000_000_000_000_000"))
    assert "warning: [bus] requests_bytes_max" in folders.prepare()


def test_no_secret_is_said_but_by_show(folders: Folders) -> None:
    said = folders.prepare()
    access = folders.access()
    every = [access.mesh_key, *access.services.values()]
    every += [text for t in access.tenants.values() for text in (t.password, t.api_key)]
    assert [secret for secret in every if secret in said] == []
    assert json.loads(show(folders.dir, folders.config, "acme")) == {
        "user": "acme",
        "password": access.tenants["acme"].password,
        "api_key": access.tenants["acme"].api_key,
    }


@pytest.mark.parametrize(
    ("config", "more", "expected"),
    [
        pytest.param("[bus", {}, "waterclock.toml", id="no TOML"),
        pytest.param("", {}, r"at least one \[tenants", id="no tenant"),
        pytest.param(
            "[tenants]\nacme = 1\n", {}, r"expected \[tenants", id="a tenant that is none"
        ),
        pytest.param(
            '[bus]\npassword = "x"\n[tenants.a]\n', {}, "password stands there", id="a secret in it"
        ),
        pytest.param("tenants = {a = {}}\n", {}, "lines of their own", id="tenants in a line"),
        pytest.param('[tenants."a b"]\n', {}, "tenant 'a b'", id="a name that is none"),
        pytest.param(CONFIG, {"sync_interval": "soon"}, "200ms", id="no duration"),
        pytest.param(CONFIG, {"owners": {"valkey": 1}}, "--owner valkey", id="unknown owner"),
        pytest.param(CONFIG, {"renew": ["nobody"]}, "--renew nobody", id="unknown to renew"),
        pytest.param(
            CONFIG.replace("1000", '"1 GB"'), {}, "events_bytes_max: expected bytes", id="no size"
        ),
    ],
)
def test_what_cannot_be_is_refused(
    folders: Folders, config: str, more: dict[str, Any], expected: str
) -> None:
    folders.config.write_text(config)
    with pytest.raises(MeshError, match=expected):
        folders.prepare(**more)
    assert not (folders.dir / "nats" / "nats.conf").exists()


def test_a_damaged_access_file_is_not_replaced(folders: Folders) -> None:
    folders.prepare()
    file = folders.dir / "access.json"
    file.write_bytes(file.read_bytes()[:-20])
    damaged = file.read_bytes()
    with pytest.raises(MeshError, match="restore it from a backup"):
        folders.prepare()
    assert file.read_bytes() == damaged


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("[a.b]\n[c]\nx = 1", id="no line feed at the end"),
        pytest.param(" [ a.b ]  # why\ny = 2\n[c]\nx = 1\n", id="spaces and a comment"),
        pytest.param("[a]\nx = 1\n", id="only its parent is there"),
        pytest.param('[c]\nx = """\n[c2]\n"""\n', id="something like a header in a text"),
    ],
)
def test_additions_come_into_their_tables_and_nothing_else_changes(text: str) -> None:
    expected = tomllib.loads(text)
    expected.setdefault("a", {}).setdefault("b", {})["new"] = ["1"]
    assert tomllib.loads(with_additions(text, {("a", "b"): {"new": ["1"]}})) == expected


def test_a_text_that_looks_like_the_header_is_not_taken_for_it() -> None:
    with pytest.raises(ValueError, match="lines of their own"):
        with_additions('[c]\nx = """\n[a]\n"""\n', {("a",): {"new": "1"}})


def test_secrets_differ() -> None:
    access = complete(None, ["acme", "globex"])
    every = [access.mesh_key, *access.services.values()]
    every += [text for t in access.tenants.values() for text in (t.password, t.api_key)]
    assert len(set(every)) == len(every)
    assert min(map(len, every)) >= 32


def test_the_command_says_what_is_wrong_and_fails(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--dir", str(folders.dir), "--config", str(folders.config)]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--show", "acme"])
    assert ended.value.code == 1
    assert "run this without --show first" in capsys.readouterr().err
    main([*arguments, "--store", str(folders.store)])
    capsys.readouterr()
    main([*arguments, "--show", "acme"])
    assert json.loads(capsys.readouterr().out)["user"] == "acme"


def test_it_needs_nothing_that_the_image_leaves_out() -> None:
    """The image of ``init`` has neither the bus's client nor anything that draws or serves."""
    code = (
        "import sys, waterclock.init\n"
        "print([name for name in ('matplotlib', 'nats', 'rich', 'cyclopts', 'waterclock_producer')"
        " if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
