"""House rules that a program can check, over all files that are or could be committed.

Patterns are put together from pieces, so that this file does not match them itself.
"""

import ast
import hashlib
import io
import os
import re
import subprocess
import tokenize
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE_BYTES_MAX = 400_000
"""A clone is read by people; what is larger is made by a script or fetched from where it lives."""

# A licence is the same text everywhere, whatever it says.
LICENCE_FILES = {"LICENSE"}
# What our own commands make, and no archive has.
SKIPPED_FOLDERS = {
    ".git",
    ".hypothesis",
    ".import_linter_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".venv",
    "__pycache__",
}


def _any(*words: str) -> str:
    return "|".join(words)


FORBIDDEN = {
    "the address of a package registry": re.compile(
        _any(
            "py" + r"pi\.org",
            "python" + r"hosted\.org",
            "registry" + r"\.npmjs",
            "deb" + r"\.debian\.org",
            "proxy" + r"\.golang",
            "npm" + "mirror",
            "files" + r"\.python",
        )
    ),
    "a path of one machine": re.compile(
        _any(
            "/" + "work/", "/" + "farm/", "/tmp/" + "bash_jobs", "/" + "root/", "/home" + r"/[a-z]"
        )
    ),
    "how the work is organised": re.compile(
        _any(
            "(?i:this " + "session)",
            r"\bCE" + r"O\b",
            "(?i:sub" + "agent)",
            "(?i:the helper " + "agent)",
            "(?i:issue #?[0-9]+ " + "asks)",
        )
    ),
    "work left for later": re.compile(
        _any(r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", r"\bX" + r"XX\b")
    ),
    "a merge that was not finished": re.compile("^(<{7}|>{7}) ", re.MULTILINE),
}

VAGUE_NAMES = {"util", "utils", "common", "misc", "manager", "managers"}

IGNORE = re.compile(r"#\s*(type|pyright):\s*ignore")
IGNORE_WITH_RULE_AND_REASON = re.compile(
    r"#\s*(type|pyright):\s*ignore\[[A-Za-z-]+(, ?[A-Za-z-]+)*\]\W+\w+\W+\w+"
)
FILE_WIDE = re.compile(r"#\s*pyright:\s*(basic|standard|off)\b")

PIN = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*==[A-Za-z0-9.+!]+( ; [^@]+)?")


# --- the rules, each over one text


def forbidden_in(text: str) -> list[str]:
    """Return `line: what it holds` for everything in ``text`` that no file may hold."""
    return [
        f"{text.count(chr(10), 0, found.start()) + 1}: {what}: {found[0]!r}"
        for what, pattern in FORBIDDEN.items()
        for found in pattern.finditer(text)
    ]


def unexplained_ignores(source: str) -> list[str]:
    """Return the lines of Python ``source`` that switch a type check off without rule or reason."""
    comments = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    return [
        f"{comment.start[0]}: {comment.string}"
        for comment in comments
        if (
            IGNORE.search(comment.string) and not IGNORE_WITH_RULE_AND_REASON.search(comment.string)
        )
        or FILE_WIDE.search(comment.string)
    ]


def float_fields(source: str) -> list[str]:
    """Return the annotated fields of classes in Python ``source`` whose type names `float`."""
    return [
        f"{field.lineno}: {cls.name}.{ast.unparse(field.target)}"
        for cls in ast.walk(ast.parse(source))
        if isinstance(cls, ast.ClassDef)
        for field in cls.body
        if isinstance(field, ast.AnnAssign)
        and re.search(r"\bfloat\b", ast.unparse(field.annotation))
    ]


def event_types(source: str) -> list[str]:
    """Return the type names of the event classes (`TYPE: ClassVar[str] = "…"`) in ``source``."""
    return [
        field.value.value
        for cls in ast.walk(ast.parse(source))
        if isinstance(cls, ast.ClassDef)
        for field in cls.body
        if isinstance(field, ast.AnnAssign)
        and ast.unparse(field.target) == "TYPE"
        and isinstance(field.value, ast.Constant)
        and isinstance(field.value.value, str)
    ]


def dead_links(text: str, folder: Path) -> list[str]:
    """Return the relative links of Markdown ``text``, seen from ``folder``, that lead nowhere."""
    without_code = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    links: list[str] = re.findall(r"\]\(([^)\s]+)\)", without_code)
    return [
        link
        for link in links
        if not re.match(r"[a-z]+:|#", link) and not (folder / link.partition("#")[0]).exists()
    ]


# --- the files


@cache
def repository_files() -> tuple[Path, ...]:
    """Return what is tracked, and what is neither tracked nor ignored.

    Where git or its folder is absent (an unpacked archive), all files count but those that our own
    commands make.
    """
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(git, capture_output=True, check=True).stdout.decode().split("\0")
        paths = [ROOT / name for name in listed if name]
    except (FileNotFoundError, subprocess.CalledProcessError):
        paths = []
        for folder, folders, names in os.walk(ROOT):
            folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
            paths += [Path(folder) / name for name in names]
    return tuple(sorted(path for path in paths if path.is_file()))


@cache
def texts() -> dict[str, str]:
    """Return every text file's content by its path from the root."""
    found: dict[str, str] = {}
    for path in repository_files():
        content = path.read_bytes()
        if b"\0" not in content[:8192]:
            found[path.relative_to(ROOT).as_posix()] = content.decode(errors="replace")
    return found


def python_sources(prefix: str = "") -> dict[str, str]:
    return {
        name: text
        for name, text in texts().items()
        if name.endswith(".py") and name.startswith(prefix)
    }


def distributions() -> dict[str, dict]:
    """Return the parsed pyproject.toml of every distribution by its folder."""
    return {
        name.removesuffix("/pyproject.toml"): tomllib.loads(text)
        for name, text in texts().items()
        if name.endswith("/pyproject.toml")
    }


def package_folder(distribution: str) -> str:
    (package,) = distributions()[distribution]["tool"]["hatch"]["build"]["targets"]["wheel"][
        "packages"
    ]
    return f"{distribution}/{package}"


# --- what holds for the repository


def test_no_file_holds_what_no_file_may_hold() -> None:
    found = [
        f"{name}:{finding}"
        for name, text in texts().items()
        if name not in LICENCE_FILES
        for finding in forbidden_in(text)
    ]
    assert found == []


def test_no_file_is_too_large() -> None:
    sizes = {path.relative_to(ROOT): path.stat().st_size for path in repository_files()}
    assert {name: size for name, size in sizes.items() if size > FILE_BYTES_MAX} == {}


def test_no_module_has_a_name_that_says_nothing() -> None:
    vague = [
        name
        for name in python_sources()
        if any(VAGUE_NAMES & set(part.split("_")) for part in Path(name).with_suffix("").parts)
    ]
    assert vague == []


def test_every_ignored_type_error_names_its_rule_and_its_reason() -> None:
    found = [
        f"{name}:{line}"
        for name, source in python_sources().items()
        for line in unexplained_ignores(source)
    ]
    assert found == []


def test_no_event_field_is_a_float() -> None:
    sources = python_sources("proto/waterclock_proto/")
    assert sources, "proto/waterclock_proto expected, no source found there"
    found = [
        f"{name}:{field}" for name, source in sources.items() for field in float_fields(source)
    ]
    assert found == []


def test_every_event_stands_in_the_flow_table() -> None:
    sources = python_sources("proto/waterclock_proto/").values()
    types = [name for source in sources for name in event_types(source) if name]
    assert types, "event classes expected in proto/waterclock_proto, none found"
    page = texts().get("ARCHITECTURE.md")
    if page is None:
        pytest.skip("no ARCHITECTURE.md to compare with yet")
    table = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    assert [name for name in types if f"`{name}`" not in table] == []


def test_every_link_between_documents_leads_somewhere() -> None:
    found = [
        f"{name}: {link}"
        for name, text in texts().items()
        if name.endswith(".md")
        for link in dead_links(text, (ROOT / name).parent)
    ]
    assert found == []


def test_all_distributions_have_one_version() -> None:
    projects = [project["project"] for project in distributions().values()]
    (version,) = {project["version"] for project in projects}
    ours = {project["name"] for project in projects}
    wrong = [
        f"{project['name']} needs {needed}"
        for project in projects
        for needed in project["dependencies"]
        if re.split(r"[<>=!~ \[]", needed, maxsplit=1)[0] in ours
        and not needed.endswith(f"=={version}")
    ]
    assert wrong == []


def test_every_distribution_is_known_to_every_tool() -> None:
    """A package that a tool's list leaves out is silently not checked by it."""
    tool = tomllib.loads(texts()["pyproject.toml"])["tool"]
    found = distributions()
    names = sorted(project["project"]["name"] for project in found.values())
    packages = sorted(package_folder(folder) for folder in found)
    assert sorted(tool["uv"]["workspace"]["members"]) == sorted(found)
    assert sorted(tool["uv"]["sources"]) == names
    assert sorted(tool["pyright"]["strict"]) == packages
    assert sorted(tool["importlinter"]["root_packages"]) == sorted(
        Path(package).name for package in packages
    )


def test_every_package_is_typed_and_no_folder_above_it_is_a_package() -> None:
    for folder in distributions():
        package = package_folder(folder)
        assert f"{package}/py.typed" in texts()
        assert f"{package}/__init__.py" in texts()
        above = [parent / "__init__.py" for parent in Path(package).parents]
        assert [path.as_posix() for path in above if path.as_posix() in texts()] == []


def test_pins_are_names_and_exact_versions_only() -> None:
    lines = [
        line
        for line in texts()["constraints.txt"].splitlines()
        if line and not line.startswith("#")
    ]
    assert lines
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    assert [name for name in texts() if Path(name).name == "uv.lock"] == []


def test_nothing_is_a_copy_of_the_data_beside_the_repository(shared_data: Path) -> None:
    by_size: dict[int, list[Path]] = {}
    for path in repository_files():
        if path.name not in LICENCE_FILES:
            by_size.setdefault(path.stat().st_size, []).append(path)
    outside = [
        path
        for path in shared_data.rglob("*")
        # Shorter files are equal by chance, an empty one to begin with.
        if path.is_file() and path.stat().st_size > 200 and path.stat().st_size in by_size
    ]
    copies = [
        f"{ours.relative_to(ROOT)} is {path.relative_to(shared_data)}"
        for path in outside
        for ours in by_size[path.stat().st_size]
        if hashlib.sha256(ours.read_bytes()).digest() == hashlib.sha256(path.read_bytes()).digest()
    ]
    assert copies == []


# --- that the rules find what they are for


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("index = https://py" + "pi.org/simple", id="registry"),
        pytest.param("COPY . /" + "root/app", id="path of one machine"),
        pytest.param("found in this " + "session", id="how the work is organised"),
        pytest.param("# TO" + "DO: later", id="left for later"),
        pytest.param("a\n" + "<" * 7 + " HEAD\n", id="unfinished merge"),
    ],
)
def test_forbidden_text_is_found(text: str) -> None:
    assert len(forbidden_in(text)) == 1


@pytest.mark.parametrize(
    "comment",
    [
        pytest.param("type: ignore", id="no rule"),
        pytest.param("pyright: ignore[reportAny]", id="no reason"),
        pytest.param("pyright: ignore", id="pyright, no rule"),
        pytest.param("pyright: basic", id="a whole file"),
    ],
)
def test_an_ignore_without_rule_or_reason_is_found(comment: str) -> None:
    assert len(unexplained_ignores(f"x = 1  # {comment}\n")) == 1


@pytest.mark.parametrize(
    "comment",
    [
        "pyright: ignore[reportAny]  # the library has no types",
        "pyright: ignore[reportAny, reportUnknownMemberType]: the library has no types",
    ],
)
def test_an_ignore_with_rule_and_reason_passes(comment: str) -> None:
    assert unexplained_ignores(f"x = 1  # {comment}\n") == []


@pytest.mark.parametrize("annotation", ["float", "float | None", "Annotated[float, Meta(ge=0)]"])
def test_a_float_field_is_found(annotation: str) -> None:
    assert len(float_fields(f"class Event(Struct):\n    at: {annotation}\n")) == 1


def test_an_event_type_is_found() -> None:
    source = 'class A(Event):\n    TYPE: ClassVar[str] = "a"\nclass B:\n    TYPE: ClassVar[str]\n'
    assert event_types(source) == ["a"]


def test_a_dead_link_is_found() -> None:
    text = "[a](gone.md) [b](https://example.org) [c](#part) `[d](code.md)` [e](pyproject.toml#x)"
    assert dead_links(text, ROOT) == ["gone.md"]


@pytest.mark.parametrize(
    "line", ["redis", "redis>=8", "redis @ file:///x", "-e ./proto", "redis==8.1.0 --hash=sha256:0"]
)
def test_what_is_no_pin_is_found(line: str) -> None:
    assert not PIN.fullmatch(line)
