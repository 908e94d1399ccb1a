"""Settings from one TOML file and the environment, with every mistake named at once.

A section ``[bus]`` is a msgspec Struct; ``WATERCLOCK_BUS__URL`` overrides its ``url``. Tables
of named things (``[tenants.acme]``) are ``dict[str, Struct]``; ``WATERCLOCK_TENANTS__ACME__TIER``
reaches into them, and finds ``[tenants.big-corp]`` as ``BIG_CORP``. What nobody declared is a
mistake, because a misspelt limit that is silently ignored is worse than no limit.
"""

import difflib
import os
import re
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import (
    Annotated,
    Any,
    TypeGuard,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from waterclock_runtime.errors import ConfigRefused

CONFIG_VARIABLE = "WATERCLOCK_CONFIG"
PREFIX = "WATERCLOCK_"

SECTIONS = (
    "service",
    "bus",
    "admission",
    "tenants",
    "models",
    "scheduler",
    "pools",
    "ladder",
    "worker",
    "workers",
    "ledger",
    "http",
)
"""What the mesh's file is known to hold. A service reads its own sections and cannot judge the
others; but one that looks like a misspelt name of these is a mistake."""

T = TypeVar("T")


class SettingsLoader:
    """Collects mistakes over all sections that a service reads; ``finish`` raises them together."""

    def __init__(
        self, *, file: Path | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        self._environ = dict(os.environ if environ is None else environ)
        if file is None and self._environ.get(CONFIG_VARIABLE):
            file = Path(self._environ[CONFIG_VARIABLE])
        self.file = file
        self.mistakes: list[str] = []
        self._table: dict[str, Any] = {}
        if file is not None:
            self._table = self._read(file)
        self._check_section_names()

    def section(self, name: str, kind: type[T]) -> T | None:
        """The section as ``kind``; None, with the mistakes noted, if it is not one."""
        found: Any = self._table.get(name, {})
        if not isinstance(found, dict):
            self.mistakes.append(f"[{name}]: expected a table, found {_found(found)}")
            return None
        table = self._overlay(name, cast("dict[str, Any]", found), kind)
        return cast("T | None", self._build(f"[{name}]", table, kind))

    def finish(self) -> None:
        """Say what was found.

        Raises:
            ConfigRefused: if any section had a mistake.
        """
        if self.mistakes:
            # A section that two readers want is judged twice.
            raise ConfigRefused(list(dict.fromkeys(self.mistakes)))

    def mistake(self, text: str) -> None:
        """Note what only a whole settings object can show to be wrong."""
        self.mistakes.append(text)

    def _read(self, file: Path) -> dict[str, Any]:
        try:
            return tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            self.mistakes.append(f"{file}: cannot be read: {error.strerror}")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            self.mistakes.append(f"{file}: not TOML: {error}")
        return {}

    def _check_section_names(self) -> None:
        for name in self._table:
            self._check_section_name(name, f"[{name}]")
        for variable in self._environ:
            name, nested, _ = variable.removeprefix(PREFIX).partition("__")
            if variable.startswith(PREFIX) and nested:
                self._check_section_name(name.lower(), variable)

    def _check_section_name(self, name: str, where: str) -> None:
        near = difflib.get_close_matches(name, SECTIONS, n=1, cutoff=0.75)
        if near and name not in SECTIONS:
            self.mistakes.append(f"{where}: unknown section; did you mean [{near[0]}]?")

    def _overlay(self, section: str, table: dict[str, Any], kind: object) -> dict[str, Any]:
        prefix = f"{PREFIX}{section.upper()}__"
        merged = dict(table)
        for variable, text in sorted(self._environ.items()):
            if not variable.startswith(prefix):
                continue
            path = [part.lower() for part in variable[len(prefix) :].split("__")]
            if not all(path):
                self.mistakes.append(f"{variable}: a name between two `__` is empty")
                continue
            target = merged
            for place, part in enumerate(path):
                key = path[place] = _matching(part, target)
                if place == len(path) - 1:
                    target[key] = _from_text(text, _kind_at(kind, path))
                    break
                deeper: Any = target.get(key, {})
                copy: dict[str, Any] = (
                    dict(cast("dict[str, Any]", deeper)) if isinstance(deeper, dict) else {}
                )
                target[key] = copy
                target = copy
        return merged

    def _build(self, where: str, value: Any, kind: object) -> Any:
        """``value`` as ``kind``; None where that is a mistake (or what an optional one says)."""
        kind = _without_none(kind)
        if _is_struct(kind):
            if not isinstance(value, dict):
                self.mistakes.append(f"{where}: expected a table, found {_found(value)}")
                return None
            return self._build_struct(where, cast("dict[str, Any]", value), kind)
        inner = _struct_inside(kind)
        if inner is not None and get_origin(kind) is dict and isinstance(value, dict):
            return self._build_all(
                {
                    key: (f"{where[:-1]}.{key}]", item)
                    for key, item in cast("dict[str, Any]", value).items()
                },
                inner,
            )
        if inner is not None and isinstance(value, list):
            items = {
                str(place): (f"{where}[{place}]", item)
                for place, item in enumerate(cast("list[Any]", value))
            }
            built = self._build_all(items, inner)
            if built is None:
                return None
            return tuple(built.values()) if get_origin(kind) is tuple else list(built.values())
        try:
            return msgspec.convert(value, cast("type[Any]", kind))
        except msgspec.ValidationError as error:
            found = _found(value) if _SECRET.search(where) is None else "something else"
            self.mistakes.append(f"{where}: {_readable(error)}, found {found}")
            return None

    def _build_all(
        self, items: Mapping[str, tuple[str, Any]], kind: object
    ) -> dict[str, Any] | None:
        built = {key: self._build(where, item, kind) for key, (where, item) in items.items()}
        return None if None in built.values() else built

    def _build_struct(self, where: str, table: dict[str, Any], kind: type[msgspec.Struct]) -> Any:
        before = len(self.mistakes)
        fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        values: dict[str, Any] = {}
        for key, value in table.items():
            if key not in fields:
                self.mistakes.append(f"{where} {key}: unknown setting{_hint(key, fields)}")
                continue
            nested = f"{where[:-1]}.{key}]" if isinstance(value, dict) else f"{where} {key}"
            values[fields[key].name] = self._build(nested, value, fields[key].type)
        for key, field in fields.items():
            if field.required and key not in table:
                self.mistakes.append(f"{where} {key}: missing; expected {_name(field.type)}")
        if len(self.mistakes) > before:
            return None
        try:
            return kind(**values)
        except (ValueError, TypeError) as error:
            # A Struct's own __post_init__ says what its fields together get wrong.
            self.mistakes.append(f"{where}: {error}")
            return None


def load_settings(
    kind: type[T],
    *,
    section: str,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """One section alone.

    Raises:
        ConfigRefused: with every mistake of that section.
    """
    loader = SettingsLoader(file=file, environ=environ)
    settings = loader.section(section, kind)
    loader.finish()
    assert settings is not None
    return settings


def _matching(part: str, table: Mapping[str, Any]) -> str:
    """The key that a part of a variable's name means: there a name has no case and no hyphen."""
    for key in table:
        if key.lower().replace("-", "_") == part:
            return key
    return part


def _kind_at(kind: object, path: Iterable[str]) -> object:
    for part in path:
        kind = _without_none(kind)
        if _is_struct(kind):
            kind = get_type_hints(kind, include_extras=True).get(part, str)
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        else:
            return str
    return kind


def _is_struct(kind: object) -> TypeGuard[type[msgspec.Struct]]:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _without_none(kind: object) -> object:
    """``Struct | None`` as ``Struct``; TOML has no null to tell them apart by."""
    if get_origin(kind) in (Union, types.UnionType):
        rest = [part for part in get_args(kind) if part is not type(None)]
        if len(rest) == 1 and (_is_struct(rest[0]) or _struct_inside(rest[0]) is not None):
            return rest[0]
    return kind


def _struct_inside(kind: object) -> type[msgspec.Struct] | None:
    """What a dict, list or tuple of Structs holds."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is dict and len(inside) == 2 and _is_struct(inside[1]):
        return inside[1]
    if origin is list and len(inside) == 1 and _is_struct(inside[0]):
        return inside[0]
    if origin is tuple and len(inside) == 2 and inside[1] is ... and _is_struct(inside[0]):
        return inside[0]
    return None


def _from_text(text: str, kind: object) -> object:
    """An environment variable as the field wants it: a string as it is, anything else as TOML."""
    try:
        return msgspec.convert(text, cast("type[Any]", kind), strict=True)
    except (msgspec.ValidationError, TypeError):
        pass
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _readable(error: msgspec.ValidationError) -> str:
    """``Expected `int`, got `str` - at `$[0]``` without the path to the root."""
    text = str(error).replace(" - at `$`", "").replace("`$", "`")
    text = text.partition(", got ")[0] + text.partition(" - at ")[1] + text.partition(" - at ")[2]
    return text[:1].lower() + text[1:]


def _found(value: object) -> str:
    """What stands there, short."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    return str(value).lower() if isinstance(value, bool) else repr(value)[:80]


def _hint(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"


def _name(kind: object) -> str:
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return kind.__name__ if isinstance(kind, type) else str(kind)


_SECRET = re.compile("password|key|secret|token$")
"""Settings whose values are never shown."""
