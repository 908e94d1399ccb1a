"""What a producer raises, named by what the caller can do next.

* ProducerError
  - InvalidSubmission   correct the submission; nothing was sent
  - NotConnected        correct address or credentials, or wait for the bus
  - InFlightFull        wait for answers, then submit again
  - NotStored           unknown whether it was stored: send the same bytes again
  - ReceiptPending      wait longer
  - AnswerPending       wait longer, or resume
  - AnswerGone          it ended, and its answer is no longer kept
  - ReceiptsNotKept     make room for receipts; nothing more is submitted until then
  - ProducerClosed      connect again, and resume what is open
"""


class ProducerError(Exception):
    """The base of everything below."""


class InvalidSubmission(ProducerError, ValueError):
    pass


class NotConnected(ProducerError):
    pass


class InFlightFull(ProducerError):
    pass


class NotStored(ProducerError):
    """No acknowledgement came within the bound. The request may be stored and run all the same."""


class ReceiptPending(ProducerError, TimeoutError):
    pass


class AnswerPending(ProducerError, TimeoutError):
    pass


class AnswerGone(ProducerError):
    pass


class ReceiptsNotKept(ProducerError):
    pass


class ProducerClosed(ProducerError):
    pass
