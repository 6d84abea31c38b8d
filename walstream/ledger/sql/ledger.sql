-- The ledger's own table, as the source design has it; made only where it does not exist yet.
-- The names of the table and of its columns are filled in, quoted, before this runs.
CREATE TABLE $table (
    $seq          bigserial   PRIMARY KEY,
    $session_id   uuid        NOT NULL,
    $agent_id     text        NOT NULL,
    $event_type   text        NOT NULL,
    $payload      jsonb       NOT NULL,
    $created_at   timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX ON $table ($session_id, $seq);
CREATE INDEX ON $table ($agent_id, $seq);
