"""``waterclock replay``: the ledger's record, read offline."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TextIO

from waterclock.mesh import MeshError
from waterclock_ledger import check as checking
from waterclock_ledger import files, report, timeline


def run_replay(
    data: Path,
    *,
    clock: Literal["queue", "exec"],
    tenant: str | None,
    since: str | None,
    request: str | None,
    as_json: bool,
    verify: bool,
    out: TextIO,
    width: int = 100,
) -> int:
    """Write the answer to ``out``; the exit status.

    Raises:
        MeshError: there is no record, it is damaged, or the question cannot be understood.
    """
    folder = find_record(data)
    try:
        if verify:
            return _verify(folder, out)
        if request is not None:
            of, slash, request_id = request.partition("/")
            if not slash:
                raise MeshError(f"--request: expected TENANT/ID, found {request!r}")
            out.write(timeline.request_text(folder, of, request_id, width=width))
            return 0
        found = report.replay(
            folder, clock, tenant, None if since is None else parse_since_us(since)
        )
    except (files.LogMissing, files.LogDamaged, LookupError) as error:
        raise MeshError(str(error.args[0] if error.args else error)) from error
    out.write(found.to_json().decode() if as_json else found.to_text())
    return 0


def find_record(data: Path) -> Path:
    """The ledger's folder: ``data`` itself, or ``ledger`` in it.

    Raises:
        MeshError: neither holds a record.
    """
    for folder in (data, data / "ledger"):
        if (folder / "log").is_dir():
            return folder
    raise MeshError(
        f"no record in {data}: expected a folder {data / 'ledger' / 'log'};"
        " name the mesh's data folder, or a copy of its ledger, with --data"
    )


def parse_since_us(text: str) -> int:
    """Unix microseconds of a UTC date and time, or of a number of microseconds.

    Raises:
        MeshError: it is neither.
    """
    if text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise MeshError(
            f"--since: expected UTC such as 2026-01-31T08:00, or Unix µs; found {text!r}"
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since_epoch = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since_epoch.days * 86_400 + since_epoch.seconds) * 10**6 + since_epoch.microseconds


def _verify(folder: Path, out: TextIO) -> int:
    found = checking.check(folder)
    out.writelines(f"violation: {violation}\n" for violation in found.violations)
    out.writelines(f"open: {name} has not ended\n" for name in found.open)
    out.write(f"{len(found.violations)} violations, {len(found.open)} open requests\n")
    return 1 if found.violations else 0
