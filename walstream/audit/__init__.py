"""The audit trail: every event on record, in order, in files that anyone can verify (format: docs/audit.md)."""
