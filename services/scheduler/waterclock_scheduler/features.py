"""What a request's body says that matters for its place in a queue: its language and its length.

The text is looked at once and forgotten; neither it nor anything that could be read back from
it leaves this module.
"""

from typing import Final

import msgspec

from waterclock_proto.events import Admitted
from waterclock_proto.requests import (
    Submission,
    body_commitment,
    body_salt,
    estimate_prompt_tokens,
    prompt_text,
)
from waterclock_scheduler.board import Features
from waterclock_scheduler.language import detect

_DECODER: Final = msgspec.json.Decoder(Submission)


def read_features(
    admitted: Admitted, body: bytes | None, *, mesh_key: bytes, permille_min: int
) -> Features:
    """The features of an admitted request.

    A body that is missing, or is not the one that was admitted, is no reason to hold the
    request back here: the default pool takes it, and its worker says what is wrong with it.
    """
    text = None if body is None else _text(admitted, body, mesh_key)
    if text is None:
        return Features("und", "unread", 0, admitted.prompt_tokens_estimate)
    prompt_tokens = estimate_prompt_tokens(text)
    found = detect(text)
    if found.language == "und" or found.permille < permille_min:
        return Features("und", "default", found.permille, prompt_tokens)
    return Features(found.language, "script", found.permille, prompt_tokens)


def _text(admitted: Admitted, body: bytes, mesh_key: bytes) -> str | None:
    salt = body_salt(mesh_key, admitted.tenant, admitted.id)
    if body_commitment(salt, body) != admitted.body_commitment:
        return None
    try:
        return prompt_text(_DECODER.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
