-- Migration 007: what the tamper alarm knows of each change of the ledger (docs/audit.md, "Tamper alarm").
ALTER TABLE $namespace.violations
    ADD COLUMN id              bigint GENERATED ALWAYS AS IDENTITY,     -- rises in the order of commits
    ADD COLUMN origin          text NOT NULL DEFAULT 'stream'
                               CHECK (origin IN ('stream', 'catalogue', 'reconciler', 'verify')),
    ADD COLUMN committed_at    timestamptz,
    ADD COLUMN keys            jsonb,                                   -- of the row as it is now
    ADD COLUMN old_keys        jsonb,                                   -- and as it was
    ADD COLUMN changes         bigint NOT NULL DEFAULT 1,               -- a row stands for so many
    ADD COLUMN seqs            jsonb,                                   -- of those, as ranges [first, last]
    ADD COLUMN acknowledged_at timestamptz,
    ADD COLUMN acknowledged_by text,
    ADD COLUMN note            text;
CREATE UNIQUE INDEX violations_id ON $namespace.violations (id);
CREATE INDEX violations_open ON $namespace.violations (id) WHERE acknowledged_at IS NULL;

-- What the catalogue said of the ledger when it was last looked at: a difference is an alarm.
CREATE TABLE $namespace.ledger_catalogue (
    what    text        NOT NULL PRIMARY KEY,                           -- a relation by its OID, a trigger, the publication
    facts   jsonb       NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT now()
);
