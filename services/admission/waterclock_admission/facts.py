"""What a decision needs to know of a submission; its text is not among it."""

from msgspec import Struct

from waterclock_proto.names import Language, RejectReason


class Facts(Struct, frozen=True, kw_only=True, gc=False):
    """A well-formed submission, read."""

    tenant: str
    id: str
    commitment: bytes
    """HMAC-SHA-256 of the body under its salt, 32 bytes."""
    body_bytes: int
    arrival_us: int
    """When the edge accepted it, or else the bus stored it."""
    resume: bool = False
    model: str | None = None
    stream: bool = False
    prompt_tokens_estimate: int = 0
    output_tokens: int | None = None
    deadline_ms: int | None = None
    deadline_us: int | None = None
    language_hint: Language | None = None
    session_fingerprint: str = ""
    sent_us: int | None = None


class Refusal(Struct, frozen=True, kw_only=True, gc=False):
    """A body that is no submission."""

    reason: RejectReason
    detail: str
    """What was expected and found. Never a word of the body."""
    id: str = ""
    """Its id, where one could be read."""
