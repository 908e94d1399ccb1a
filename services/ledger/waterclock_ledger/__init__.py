"""Ledger: the record of every event, and the verdicts drawn from it."""
