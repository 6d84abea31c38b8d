-- Migration 001: walstream's own tables, in a schema of their own. The ledger's table is made by
-- ledger.sql, and only where the user has none.
-- The name of the schema is filled in, quoted, before this runs.

CREATE TABLE $namespace.migrations (
    version    integer     PRIMARY KEY,
    name       text        NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- Who this ledger is. One row. A position is only good for the same identity (docs/architecture.md, "Identity").
CREATE TABLE $namespace.identity (
    only_row          boolean     PRIMARY KEY DEFAULT true CHECK (only_row),
    ledger_id         uuid        NOT NULL DEFAULT gen_random_uuid(),
    environment       text        NOT NULL,
    epoch             integer     NOT NULL DEFAULT 1,       -- rises when history changes: a seq may then be given twice
    system_identifier text        NOT NULL,
    timeline          integer     NOT NULL,
    table_namespace   text        NOT NULL,
    table_name        text        NOT NULL,
    table_oid         oid         NOT NULL,
    publication       text        NOT NULL,
    slot              text        NOT NULL,
    slot_state        text        NOT NULL DEFAULT 'creating' CHECK (slot_state IN ('creating', 'filling', 'ready')),
    floor_seq         bigint,                               -- `init --from now`: rows up to here are never events
    created_at        timestamptz NOT NULL DEFAULT now()
);

-- The fencing row (rule 7): every order row is written by one statement that holds this row FOR SHARE and finds its
-- own generation; a takeover updates it. Nothing else is ever written here.
CREATE TABLE $namespace.generation (
    only_row   boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    generation bigint  NOT NULL
);
INSERT INTO $namespace.generation (generation) VALUES (0);

-- Who ingests at present and how far it is: lease, backends (to end a stopped one by pid *and* start time), position.
CREATE TABLE $namespace.ingest (
    only_row         boolean     PRIMARY KEY DEFAULT true CHECK (only_row),
    generation       bigint      NOT NULL DEFAULT 0,
    owner            text,                                  -- host:pid:random
    control_pid      integer,
    control_start    timestamptz,
    walsender_pid    integer,
    walsender_start  timestamptz,
    lease_until      timestamptz,
    started_at       timestamptz,
    heartbeat_at     timestamptz,
    state            text        NOT NULL DEFAULT 'stopped',
    error            text,
    confirmed_lsn    pg_lsn,                                -- acknowledged, or idle position written before it is
    proven_seq       bigint,                                -- every ledger row up to here has an offset (reconciler)
    events           bigint      NOT NULL DEFAULT 0,
    recovered        bigint      NOT NULL DEFAULT 0,
    violations       bigint      NOT NULL DEFAULT 0
);
INSERT INTO $namespace.ingest DEFAULT VALUES;

-- The commit order: a row a segment (docs/architecture.md, "The order"; the body's format: walstream/order/segment.py).
CREATE TABLE $namespace.commit_order (
    first_offset    bigint  PRIMARY KEY,
    events          integer NOT NULL CHECK (events > 0),
    last_lsn        pg_lsn  NOT NULL,                       -- end of its last commit, or, if partial: that commit's LSN
    partial_inserts integer CHECK (partial_inserts > 0),    -- the last commit goes on: this many of its rows are done
    min_seq         bigint  NOT NULL,
    max_seq         bigint  NOT NULL,
    recovered       boolean NOT NULL DEFAULT false,
    generation      bigint  NOT NULL,
    body            bytea   NOT NULL
);
ALTER TABLE $namespace.commit_order ALTER COLUMN body SET STORAGE EXTERNAL;   -- compressed already
CREATE INDEX commit_order_seq ON $namespace.commit_order USING brin (min_seq, max_seq) WITH (pages_per_range = 8, autosummarize = on);

-- Projectors and their cursors, one a lane.
CREATE TABLE $namespace.projectors (
    name         text        PRIMARY KEY,
    kind         text        NOT NULL CHECK (kind IN ('transactional', 'external')),
    desired      text        NOT NULL DEFAULT 'running' CHECK (desired IN ('running', 'paused')),
    state        text        NOT NULL DEFAULT 'new',
    error        text,
    error_offset bigint,
    lanes        integer     NOT NULL DEFAULT 1 CHECK (lanes > 0),
    target_lanes integer     NOT NULL DEFAULT 1 CHECK (target_lanes > 0),
    generation   bigint      NOT NULL DEFAULT 0,            -- fences a runner that was replaced
    owner        text,
    control_pid  integer,
    control_start timestamptz,
    lease_until  timestamptz,
    tables       text[]      NOT NULL DEFAULT '{}',
    created_at   timestamptz NOT NULL DEFAULT now(),
    updated_at   timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE $namespace.cursors (
    projector  text        NOT NULL REFERENCES $namespace.projectors (name) ON DELETE CASCADE,
    lane       integer     NOT NULL,
    position   bigint      NOT NULL,                        -- the last offset that is done
    backend_pid   integer,                                  -- who holds the lane's transactions: ended by a take-over,
    backend_start timestamptz,                              -- by pid *and* start time, for its locks would delay it
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (projector, lane)
);

-- Parked events: references, never copies. The session's first entry failed; the later ones wait behind it in order.
CREATE TABLE $namespace.parked (
    projector    text        NOT NULL REFERENCES $namespace.projectors (name) ON DELETE CASCADE,
    event_offset bigint      NOT NULL,
    seq          bigint      NOT NULL,
    session_id   text        NOT NULL,
    event_type   text        NOT NULL,
    state        text        NOT NULL CHECK (state IN ('failed', 'waiting')),
    attempts     integer     NOT NULL DEFAULT 0,
    error        text,
    traceback    text,
    next_try     timestamptz,
    parked_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (projector, event_offset)
);
CREATE INDEX parked_session ON $namespace.parked (projector, session_id, event_offset);

-- Declared removals: what stands here is passed by cursors; any other row that is gone is an alarm.
CREATE TABLE $namespace.erasures (
    first_seq bigint      NOT NULL,
    last_seq  bigint      NOT NULL CHECK (last_seq >= first_seq),
    reason    text        NOT NULL,
    erased_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (first_seq, last_seq)
);

-- What an append-only ledger should never show: a seq that comes twice (rule 6), UPDATE, DELETE, TRUNCATE.
CREATE TABLE $namespace.violations (
    kind       text        NOT NULL,
    commit_lsn pg_lsn      NOT NULL,
    ordinal    integer     NOT NULL,                        -- which change of that transaction
    seq        bigint,
    xid        bigint,
    detail     text,
    noticed_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (commit_lsn, ordinal)                       -- the same on a resend
);
