"""Puts an answer's pieces together. Pure: messages in, pieces out.

Deltas are core messages: some may be missing after a reconnect, and those of a lost attempt
count no longer. The final answer has the whole text, so what is missing is taken from it.
"""

from waterclock_proto.requests import Delta, Final, Restarted

Piece = Delta | Restarted


class Assembly:
    """The pieces of one answer, in the order in which a reader shall see them.

    The law: once ``end`` was given the final of a completed answer whose text is kept, the
    texts of all deltas after the last ``Restarted`` join to exactly ``Final.text``.
    """

    __slots__ = ("_attempt", "_broken", "_deltas", "_next", "_texts", "ended", "mended", "pieces")

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.ended = False
        self.mended = False
        """Whether the final had text that the deltas had not brought by then, or another text."""
        self._attempt = 0
        self._next = 0
        self._broken = False
        self._deltas = 0
        self._texts: list[str] = []

    def add(self, piece: Piece) -> bool:
        """Take a message from the answer subject; says whether ``pieces`` grew."""
        if self.ended or piece.attempt < self._attempt:
            return False
        if isinstance(piece, Restarted):
            self._begin(piece.attempt)
            self.pieces.append(piece)
            return True
        if piece.attempt > self._attempt:
            if self._deltas:
                # Its own ``Restarted`` was lost on the way.
                self.pieces.append(Restarted(id=piece.id, attempt=piece.attempt))
            self._begin(piece.attempt)
        if piece.index > self._next:
            # After a hole nothing can be shown any more; the final has what is missing.
            self._broken = True
        if self._broken or piece.index != self._next:
            return False
        self._next += 1
        self._deltas += 1
        self._texts.append(piece.text)
        self.pieces.append(piece)
        return True

    def end(self, final: Final) -> None:
        """Take the final, whose text mends what was shown. Only the first final counts."""
        if self.ended:
            return
        self.ended = True
        shown = "".join(self._texts)
        if not final.answer_kept or final.text == shown:
            return
        streamed = self._deltas > 0 or self._broken
        if final.text.startswith(shown):
            self.mended = streamed
            self._mend(final, final.text[len(shown) :])
        elif final.outcome == "completed":
            self.mended = streamed
            self.pieces.append(Restarted(id=final.id, attempt=final.attempt))
            self._begin(final.attempt)
            self._mend(final, final.text)

    def _begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._next = 0
        self._broken = False
        self._deltas = 0
        self._texts = []

    def _mend(self, final: Final, text: str) -> None:
        shown_tokens = 0
        for piece in reversed(self.pieces):
            if isinstance(piece, Restarted):
                break
            shown_tokens += piece.tokens
        self._texts.append(text)
        self.pieces.append(
            Delta(
                id=final.id,
                attempt=final.attempt,
                index=self._next,
                text=text,
                tokens=max(final.usage.completion_tokens - shown_tokens, 0),
            )
        )
        self._next += 1
