"""The configuration reference, made from the settings themselves.

``python -m waterclock.reference`` writes ``docs/configuration.md``; a test compares.
"""

import ast
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from waterclock_admission.config import (
    AdmissionSettings,
    HttpSettings,
    ModelSettings,
    TenantSettings,
)
from waterclock_ledger.config import LedgerSettings
from waterclock_runtime.bus import BusSettings
from waterclock_runtime.service import ServiceSettings
from waterclock_scheduler.config import (
    LadderSettings,
    PoolSettings,
    SchedulerSettings,
    ServiceTime,
)
from waterclock_worker.config import WorkerSettings

SECTIONS: Final[tuple[tuple[str, type[Struct], str], ...]] = (
    ("tenants.<name>", TenantSettings, "admission"),
    ("models.<name>", ModelSettings, "admission"),
    ("pools.<name>", PoolSettings, "scheduler, admission"),
    ("workers.<name>", WorkerSettings, "worker"),
    ("ladder", LadderSettings, "scheduler"),
    ("scheduler", SchedulerSettings, "scheduler"),
    ("scheduler.estimate", ServiceTime, "scheduler"),
    ("admission", AdmissionSettings, "admission"),
    ("http", HttpSettings, "admission"),
    ("ledger", LedgerSettings, "ledger"),
    ("bus", BusSettings, "all"),
    ("service", ServiceSettings, "all"),
)

INTRODUCTION: Final = """\
# Configuration

Written by `python -m waterclock.reference`; edit the settings' own docstrings instead.

The whole mesh reads one TOML file, named by `WATERCLOCK_CONFIG`; each service takes the sections
it needs. Any setting can be overridden by an environment variable: `WATERCLOCK_<SECTION>__<FIELD>`,
upper case, `__` between the parts, as in `WATERCLOCK_BUS__URL` or `WATERCLOCK_SCHEDULER__LEASE_MS`.
What is not a string is written as in TOML. Unknown settings are refused, and all mistakes are
reported at once. The unit is the last part of a name: `_ms`, `_s`, `_us`, `_bytes`.

`waterclock up` makes a first file in its data folder, and sets addresses and secrets by the
environment.
"""


def reference() -> str:
    """The document."""
    parts = [INTRODUCTION]
    for section, kind, readers in SECTIONS:
        parts.append(f"\n## `[{section}]`\n")
        parts.append(f"Read by: {readers}. {_text(inspect.getdoc(kind) or '')}".rstrip())
        parts.append("\n| setting | type | default | |\n|---|---|---|---|")
        documents = _field_documents(kind)
        parts += [
            f"| `{field.encode_name}` | {_type(field.type)} | {_default(field)} |"
            f" {_cell(documents.get(field.name, ''))} |"
            for field in msgspec.structs.fields(kind)
        ]
    return "\n".join(parts) + "\n"


def _field_documents(kind: type[Struct]) -> dict[str, str]:
    """The string literal after each field, as in PEP 257's attribute docstrings."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    body = tree.body[0]
    assert isinstance(body, ast.ClassDef)
    documents: dict[str, str] = {}
    for node, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            documents[node.target.id] = str(following.value.value)
    return documents


def _text(document: str) -> str:
    """A class docstring without the section's name that it begins with."""
    body = document.partition("\n\n")[0].replace("``", "`")
    body = re.sub(r"^`\[[^\]]+\]`[:;.] *", "", " ".join(body.split()))
    return body[:1].upper() + body[1:]


def _cell(document: str) -> str:
    return " ".join(document.replace("``", "`").replace("|", "\\|").split())


def _default(field: Any) -> str:
    if field.required:
        return "**needed**"
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    else:
        value = field.default
    if isinstance(value, Struct):
        return "see below"
    if value is None or value in ((), {}, ""):
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"  # pyright: ignore[reportUnknownArgumentType] - a tuple of anything
    return f"`{value}`"


def _type(kind: Any) -> str:
    """A type in words that a TOML author knows."""
    text = msgspec.json.schema(kind)
    text = (text.get("$ref", "") and {"type": "table"}) or text
    return _schema_words(text)


def _schema_words(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        words = [_schema_words(part) for part in schema["anyOf"]]
        return " or ".join(word for word in words if word != "nothing")
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "$ref" in schema:
        return "table"
    if schema.get("type") == "array":
        items = schema.get("items")
        return f"list of {_schema_words(items)}" if items else "list"
    low, high = schema.get("minimum"), schema.get("maximum")
    name = {"integer": "integer", "number": "number", "boolean": "`true`, `false`"}
    name |= {"string": "string", "object": "table", "null": "nothing"}
    word = name.get(schema.get("type", ""), "anything")
    if low is not None and high is not None:
        return f"{word}, {low:,} to {high:,}"
    return word if low is None else f"{word}, from {low:,}"


def main() -> None:
    """Write the document below the current folder."""
    path = Path("docs") / "configuration.md"
    if not path.parent.is_dir():
        sys.exit("run it in the repository's root: there is no folder docs here")
    path.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
