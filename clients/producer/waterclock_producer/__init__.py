"""Producer: submits requests, streams answers and keeps receipts."""
