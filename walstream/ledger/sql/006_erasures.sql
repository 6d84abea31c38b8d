-- Migration 006: a declared removal says which one it is, of which session, by which transaction and by whom, and what
-- was done (docs/ledger.md, "Erasing"). Declarations by hand go on as they were: all of it has a default.
-- What was declared before has no transaction and nobody: nothing is known about it.
ALTER TABLE $namespace.erasures
    ADD COLUMN id         bigint GENERATED ALWAYS AS IDENTITY,      -- rises in the order of commits (order_erasures)
    ADD COLUMN session_id text,                                     -- NULL: not of one session, as for a month that goes
    ADD COLUMN xid        bigint,                                   -- of all 64 bits; the stream tells the lower 32
    ADD COLUMN mode       text NOT NULL DEFAULT 'removed' CHECK (mode IN ('removed', 'redacted')),
    ADD COLUMN erased_by  text;
ALTER TABLE $namespace.erasures
    ALTER COLUMN xid SET DEFAULT (pg_current_xact_id()::text::bigint),
    ALTER COLUMN erased_by SET DEFAULT session_user;

-- A session can be redacted first and removed later: the same range twice. So a range is no key any more.
DO $walstream_body$
BEGIN
    EXECUTE (
        SELECT format('ALTER TABLE %s DROP CONSTRAINT %I', c.conrelid::regclass, c.conname)
          FROM pg_catalog.pg_constraint AS c
         WHERE c.conrelid = ($namespace_name || '.erasures')::regclass AND c.contype = 'p'
    );
END
$walstream_body$;
ALTER TABLE $namespace.erasures ADD PRIMARY KEY (id);

-- Sessions are interleaved, so one of them is many ranges; whoever reads asks for a seq. (The highest number that there is
-- stands for no upper bound: the range's own, one higher, would be none. A numrange costs six times as much.)
CREATE INDEX erasures_seqs ON $namespace.erasures
    USING gist (int8range(first_seq, nullif(last_seq, 9223372036854775807), '[]'));
CREATE INDEX erasures_last_seq ON $namespace.erasures (last_seq);          -- is anything from here on declared?
CREATE INDEX erasures_of_session ON $namespace.erasures (session_id) WHERE session_id IS NOT NULL;
CREATE INDEX erasures_of_transaction ON $namespace.erasures (xid, first_seq) WHERE xid IS NOT NULL;
