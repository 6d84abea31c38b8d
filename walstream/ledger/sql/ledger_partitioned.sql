-- The ledger's own table where it is to be partitioned; made only where it does not exist yet. A key of a partitioned
-- table has to hold the partition key, so seq alone cannot be the primary key here (docs/adr/0009).
-- The names of the table and of its columns are filled in, quoted, before this runs.
CREATE TABLE $table (
    $seq          bigserial   NOT NULL,
    $session_id   uuid        NOT NULL,
    $agent_id     text        NOT NULL,
    $event_type   text        NOT NULL,
    $payload      jsonb       NOT NULL,
    $created_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY ($seq, $partition_key)
) PARTITION BY $partition_method ($partition_key);
CREATE INDEX ON $table ($session_id, $seq);
CREATE INDEX ON $table ($agent_id, $seq);
