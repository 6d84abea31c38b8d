-- Migration 008: what the slot did not deliver, and how each row of it came to have an offset, or was given up.
CREATE TABLE $namespace.recoveries (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- a new slot made by set-up, or by ingest; rows found by the comparison; a change that the server cannot send
    kind         text        NOT NULL CHECK (kind IN ('birth', 'rebirth', 'reconciler', 'skip')),
    cause        text        NOT NULL,
    ended_at     timestamptz NOT NULL DEFAULT now(),
    began_at     timestamptz NOT NULL,
    events       bigint      NOT NULL CHECK (events >= 0),  -- that were taken from the ledger
    min_seq      bigint,
    max_seq      bigint,
    first_offset bigint,
    last_offset  bigint,
    slot_lsn     pg_lsn,                                    -- from where on the slot sends
    unreadable   bigint[]    NOT NULL DEFAULT '{}',         -- rows that nobody can read, and that get no offset
    generation   bigint      NOT NULL
);
