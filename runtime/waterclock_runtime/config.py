"""Settings from one TOML file and the environment, with every mistake named at once.

A section ``[bus]`` is a msgspec Struct; ``WATERCLOCK_BUS__URL`` overrides its ``url``. Tables
of named things (``[tenants.acme]``) are ``dict[str, Struct]``. What nobody declared is a
mistake, because a misspelt limit that is silently ignored is worse than no limit.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from waterclock_runtime.errors import ConfigRefused

CONFIG_VARIABLE = "WATERCLOCK_CONFIG"
PREFIX = "WATERCLOCK_"

T = TypeVar("T")


class SettingsLoader:
    """Collects mistakes over all sections that a service reads; ``finish`` raises them together."""

    def __init__(
        self, *, file: Path | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        self._environ = dict(os.environ if environ is None else environ)
        if file is None and CONFIG_VARIABLE in self._environ:
            file = Path(self._environ[CONFIG_VARIABLE])
        self.file = file
        self.mistakes: list[str] = []
        self._table: dict[str, Any] = {}
        if file is not None:
            self._table = self._read(file)

    def section(self, name: str, kind: type[T]) -> T | None:
        """The section as ``kind``; None, with the mistakes noted, if it is not one."""
        found: Any = self._table.get(name, {})
        if not isinstance(found, dict):
            self.mistakes.append(f"[{name}]: expected a table, found {type(found).__name__}")
            return None
        table = self._overlay(name, cast("dict[str, Any]", found), kind)
        return cast("T | None", self._build(f"[{name}]", table, kind))

    def finish(self) -> None:
        """Raises:
        ConfigRefused: if any section had a mistake.
        """
        if self.mistakes:
            raise ConfigRefused(self.mistakes)

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

    def _overlay(self, section: str, table: dict[str, Any], kind: object) -> dict[str, Any]:
        prefix = f"{PREFIX}{section.upper()}__"
        merged = dict(table)
        for variable, text in sorted(self._environ.items()):
            if not variable.startswith(prefix):
                continue
            path = [part.lower() for part in variable[len(prefix) :].split("__")]
            target: dict[str, Any] = merged
            for part in path[:-1]:
                deeper: Any = target.get(part, {})
                copy: dict[str, Any] = (
                    dict(cast("dict[str, Any]", deeper)) if isinstance(deeper, dict) else {}
                )
                target[part] = copy
                target = copy
            target[path[-1]] = _from_text(text, _field_type(kind, path))
        return merged

    def _build(self, where: str, value: Any, kind: Any) -> Any:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if not isinstance(value, dict):
                self.mistakes.append(f"{where}: expected a table, found {type(value).__name__}")
                return None
            return self._build_struct(where, cast("dict[str, Any]", value), kind)
        if get_origin(kind) is dict and isinstance(value, dict):
            inner = get_args(kind)[1]
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                built = {
                    key: self._build(f"{where[:-1]}.{key}]", item, inner)
                    for key, item in cast("dict[str, Any]", value).items()
                }
                return None if None in built.values() else built
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            self.mistakes.append(f"{where}: {error}")
            return None

    def _build_struct(self, where: str, table: dict[str, Any], kind: type[msgspec.Struct]) -> Any:
        before = len(self.mistakes)
        fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        values: dict[str, Any] = {}
        for key, value in table.items():
            if key not in fields:
                near = difflib.get_close_matches(key, fields, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {sorted(fields)}"
                self.mistakes.append(f"{where} {key}: unknown setting{hint}")
                continue
            kind_of_field = fields[key].type
            nested = f"{where[:-1]}.{key}]" if isinstance(value, dict) else f"{where} {key}"
            values[fields[key].name] = self._build(nested, value, kind_of_field)
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


def _field_type(kind: object, path: list[str]) -> object:
    for part in path:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            kind = get_type_hints(kind, include_extras=True).get(part, str)
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        else:
            return str
    return kind


def _from_text(text: str, kind: object) -> object:
    """An environment variable as the field wants it: a string as it is, anything else as TOML."""
    try:
        return msgspec.convert(text, kind, strict=True)
    except (msgspec.ValidationError, TypeError):
        pass
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _name(kind: object) -> str:
    return getattr(kind, "__name__", str(kind))
