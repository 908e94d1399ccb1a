"""Admission: NATS and HTTP ingress, identity, budgets and receipts."""
