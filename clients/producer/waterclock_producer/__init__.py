"""Producer: submits requests, streams answers and keeps receipts."""

from waterclock_producer.errors import (
    AnswerGone,
    AnswerPending,
    InFlightFull,
    InvalidSubmission,
    NotConnected,
    NotStored,
    ProducerClosed,
    ProducerError,
    ReceiptPending,
    ReceiptsNotKept,
)
from waterclock_producer.handle import Handle, Times
from waterclock_producer.producer import Counts, Producer, new_id, new_submission
from waterclock_producer.receipts import KeptReceipt, read_receipts, receipt_doubt
from waterclock_proto.requests import ChatMessage, Delta, Final, Receipt, Restarted, Submission

__all__ = [
    "AnswerGone",
    "AnswerPending",
    "ChatMessage",
    "Counts",
    "Delta",
    "Final",
    "Handle",
    "InFlightFull",
    "InvalidSubmission",
    "KeptReceipt",
    "NotConnected",
    "NotStored",
    "Producer",
    "ProducerClosed",
    "ProducerError",
    "Receipt",
    "ReceiptPending",
    "ReceiptsNotKept",
    "Restarted",
    "Submission",
    "Times",
    "new_id",
    "new_submission",
    "read_receipts",
    "receipt_doubt",
]
