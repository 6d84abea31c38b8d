-- Migration 009: of which events a projector's error tells, so that an erasure knows whether it has to go; and violations
-- that the audit sink finds by itself (docs/ledger.md, "Erasing"; docs/audit.md, "Tamper alarm").
ALTER TABLE $namespace.projectors
    ADD COLUMN error_seqs bigint[];                                     -- NULL: it may tell of any

ALTER TABLE $namespace.violations
    DROP CONSTRAINT violations_origin_check,
    ADD CONSTRAINT violations_origin_check
        CHECK (origin IN ('stream', 'catalogue', 'reconciler', 'verify', 'sink'));
-- One row a finding, however often its event is delivered.
CREATE UNIQUE INDEX violations_found ON $namespace.violations (seq, md5(keys::text)) WHERE origin = 'sink';
