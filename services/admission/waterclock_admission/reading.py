"""From a raw body to facts, or to the reason why it is none.

Whatever the bytes are, the answer is one of the two. Details name fields of ours, types and
sizes, and never quote the body: they stand on the tape for good.
"""

import difflib
import re
from decimal import Decimal
from typing import Literal

import msgspec
from msgspec import Struct

from waterclock_admission import limits
from waterclock_admission.facts import Facts, Refusal
from waterclock_proto.names import NAME_PATTERN
from waterclock_proto.requests import (
    ChatMessage,
    Sampling,
    Submission,
    body_commitment,
    body_salt,
    estimate_prompt_tokens,
    prompt_text,
    session_fingerprint,
)
from waterclock_proto.subjects import BODY_BYTES_MAX


def read(body: bytes, *, tenant: str, arrival_us: int, mesh_key: bytes) -> Facts | Refusal:
    """Facts of a body that arrived at ``arrival_us``; total, never raises."""
    if not body:
        return Refusal(
            reason="empty_body", detail="expected a submission as JSON, found no bytes at all"
        )
    if len(body) > BODY_BYTES_MAX:
        return Refusal(
            reason="body_too_large",
            detail=f"{len(body)} bytes, at most {BODY_BYTES_MAX} allowed",
            id=_readable_id(body),
        )
    try:
        submission = _DECODER.decode(body)
    except msgspec.ValidationError as error:
        reason, detail = _explain(str(error))
        return Refusal(reason=reason, detail=detail, id=_readable_id(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Refusal(reason="malformed", detail=_explain_syntax(error), id=_readable_id(body))
    wrong = _check(submission)
    if wrong is not None:
        return wrong
    request_id = submission.id
    commitment = bytes.fromhex(body_commitment(body_salt(mesh_key, tenant, request_id), body))
    if submission.resume:
        return Facts(
            tenant=tenant,
            id=request_id,
            commitment=commitment,
            body_bytes=len(body),
            arrival_us=arrival_us,
            resume=True,
        )
    return Facts(
        tenant=tenant,
        id=request_id,
        commitment=commitment,
        body_bytes=len(body),
        arrival_us=arrival_us,
        model=submission.model,
        stream=submission.stream,
        prompt_tokens_estimate=estimate_prompt_tokens(prompt_text(submission)),
        output_tokens=submission.max_tokens,
        deadline_ms=submission.deadline_ms,
        deadline_us=submission.deadline_us,
        language_hint=submission.language,
        session_fingerprint=(
            session_fingerprint(mesh_key, tenant, submission.session) if submission.session else ""
        ),
        sent_us=submission.sent_us,
    )


class _IdOnly(Struct):
    id: str = ""


def _readable_id(body: bytes) -> str:
    """The id of a body that is otherwise wrong, so that its producer can be told."""
    try:
        request_id = _ID_DECODER.decode(body).id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return request_id if _NAME.match(request_id) else ""


def _check(submission: Submission) -> Refusal | None:
    """What the types alone cannot say."""
    if submission.resume:
        if submission != Submission(id=submission.id, resume=True):
            return _invalid(submission, "resume: expected nothing else beside id, found more")
        return None
    if (submission.prompt is None) == (submission.messages is None):
        found = "neither" if submission.prompt is None else "both"
        return _invalid(submission, f"expected exactly one of prompt and messages, found {found}")
    if submission.prompt == "" or submission.messages == ():
        name = "prompt" if submission.prompt == "" else "messages"
        return Refusal(
            reason="empty_body", detail=f"{name}: expected something, found none", id=submission.id
        )
    if submission.messages is not None and not any(m.content for m in submission.messages):
        return Refusal(
            reason="empty_body",
            detail="messages: expected some content, found none",
            id=submission.id,
        )
    for name, text in _texts(submission):
        if "\0" in text:
            return _invalid(submission, f"{name}: expected text, found a NUL character")
        if not text.isascii() and not _is_unicode(text):
            return _invalid(submission, f"{name}: expected Unicode text, found a lone surrogate")
    sampling = submission.sampling
    if sampling is not None:
        if sampling.temperature and Decimal(sampling.temperature) > limits.TEMPERATURE_MAX:
            return _invalid(
                submission,
                f"sampling.temperature: at most {limits.TEMPERATURE_MAX}, found more",
            )
        if sampling.top_p and not 0 < Decimal(sampling.top_p) <= 1:
            return _invalid(submission, "sampling.top_p: above 0 and at most 1, found otherwise")
        if len(sampling.stop) > limits.STOPS_MAX:
            return _invalid(
                submission,
                f"sampling.stop: at most {limits.STOPS_MAX}, found {len(sampling.stop)}",
            )
        if "" in sampling.stop:
            return _invalid(submission, "sampling.stop: expected text, found an empty string")
    return None


def _texts(submission: Submission) -> list[tuple[str, str]]:
    texts = [
        ("model", submission.model or ""),
        ("prompt", submission.prompt or ""),
        ("session", submission.session or ""),
    ]
    texts += [("messages", message.content) for message in submission.messages or ()]
    if submission.sampling is not None:
        texts += [("sampling.stop", stop) for stop in submission.sampling.stop]
    return texts


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _invalid(submission: Submission, detail: str) -> Refusal:
    return Refusal(reason="invalid_field", detail=detail, id=submission.id)


def _explain(message: str) -> tuple[Literal["malformed", "unknown_field", "invalid_field"], str]:
    """The decoder's own message, without what it quotes from the body.

    Only forms that are known to hold types, bounds and names of ours pass as they are.
    """
    where = _path_in(message)
    what = message.partition(" - at `")[0]
    if where == "$" and _NOT_AN_OBJECT.match(what):
        return "malformed", what
    unknown = _UNKNOWN_FIELD.match(message)
    if unknown is not None:
        return "unknown_field", f"{where}: found an unknown field; {_near(unknown[1], where)}"
    if what.startswith("Invalid enum value"):
        field = where.rpartition(".")[2].partition("[")[0]
        return "invalid_field", f"{where}: expected one of {_CHOICES.get(field, '…')}"
    if "matching regex" in what:
        field = where.rpartition(".")[2]
        return "invalid_field", f"{where}: expected {_PATTERNS.get(field, 'another form')}"
    if _HARMLESS.fullmatch(what):
        hint = _HINTS.get(where, "")
        return "invalid_field", f"{where}: {what}{hint}"
    return "invalid_field", f"{where}: expected what the submission schema says"


def _path_in(message: str) -> str:
    """Where in the body; ``$`` unless every part of the path is a field of ours or an index."""
    found = _PATH.search(message)
    if found is None:
        return "$"
    parts = re.split(r"[.\[\]]+", found[1][1:].strip(".[]"))
    return found[1] if all(part in _FIELDS or part.isdigit() for part in parts) else "$"


def _near(name: str, where: str) -> str:
    kind = (
        ChatMessage
        if where.startswith("$.messages")
        else Sampling
        if where == "$.sampling"
        else Submission
    )
    known = sorted(_FIELDS_OF[kind])
    near = difflib.get_close_matches(name[:64], known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _explain_syntax(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "expected JSON of ordinary depth, found it nested too deeply"
    message = str(error) if isinstance(error, msgspec.DecodeError) else "not UTF-8"
    # A lone surrogate at the end of its string reads as truncated, so that is said as well.
    if "truncated" in message:
        return "expected JSON, found its end too early, or half of a surrogate pair"
    known = _SYNTAX.search(message)
    return f"expected JSON, found {known[0].lower() if known else 'something else'}"


_DECODER = msgspec.json.Decoder(Submission)
_ID_DECODER = msgspec.json.Decoder(_IdOnly)
_NAME = re.compile(NAME_PATTERN)
_FIELDS_OF: dict[type[Struct], tuple[str, ...]] = {
    kind: tuple(field.encode_name for field in msgspec.structs.fields(kind))
    for kind in (Submission, ChatMessage, Sampling)
}
_FIELDS = frozenset(name for names in _FIELDS_OF.values() for name in names)
_PATH = re.compile(r" - at `(\$[a-z_.\[\]0-9]*)`\Z")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_NOT_AN_OBJECT = re.compile(r"Expected `object`, got `[a-z]+`\Z")
_HARMLESS = re.compile(
    r"Expected `[a-z| ]+`(, got `[a-z]+`)?"
    r"|Expected `[a-z| ]+`( of length)? (>=|<=) -?[0-9]+"
    r"|Object missing required field `[a-z_]+`"
    r"|(Integer|Number) (value )?out of range"
)
_SYNTAX = re.compile(r"(?i)[a-z0-9][a-z0-9 -]+ \(byte [0-9]+\)|invalid utf-8[a-z ]*|not utf-8")
_CHOICES = {
    "role": "system, developer, user, assistant, tool",
    "language": "zh, en, other, und",
}
_PATTERNS = {
    "id": "1 to 64 letters, digits, _ and -, and not a lone _",
    "temperature": 'a decimal number as a string, such as "0.7"',
    "top_p": 'a decimal number as a string, such as "0.95"',
}
_HINTS = {f"$.sampling.{field}": "; a decimal number is written as a string" for field in _PATTERNS}
