-- Migration 003: jobs and their state machine (docs/handoffs.md), and the handoffs that could not be routed.
-- Jobs are references: whose turn it is in which session, and which event said so. No payload is copied.

ALTER TABLE $jobs
    ADD COLUMN IF NOT EXISTS agent_id              text,                      -- whose job it is
    ADD COLUMN IF NOT EXISTS event_seq             bigint,                    -- the handoff's event, if one made it
    ADD COLUMN IF NOT EXISTS priority              integer     DEFAULT 0,     -- higher ones first
    ADD COLUMN IF NOT EXISTS attempts              integer     DEFAULT 0,     -- deliveries that count
    ADD COLUMN IF NOT EXISTS max_delivery_attempts integer     DEFAULT 5,
    ADD COLUMN IF NOT EXISTS next_try              timestamptz,               -- not before
    ADD COLUMN IF NOT EXISTS hops                  integer     DEFAULT 0,     -- handoffs of the chain that led here
    ADD COLUMN IF NOT EXISTS error                 text,                      -- why it failed last, or was canceled
    ADD COLUMN IF NOT EXISTS finished_at           timestamptz,
    ADD COLUMN IF NOT EXISTS updated_at            timestamptz DEFAULT now();

-- What waits to be claimed is called SUBMITTED. The source design, and the release before, called it PENDING.
UPDATE $jobs SET status = 'SUBMITTED' WHERE status IS NULL OR status = 'PENDING';

-- The state machine. The functions look here, a trigger on the jobs holds everybody else to it, and the drawing in
-- docs/handoffs.md is made of it.
CREATE TABLE $namespace.job_transitions (
    from_status text NOT NULL,
    to_status   text NOT NULL,
    what        text NOT NULL,                              -- which functions make it, and when
    PRIMARY KEY (from_status, to_status)
);
INSERT INTO $namespace.job_transitions (from_status, to_status, what) VALUES
    ('CREATED',        'SUBMITTED',      'submit_job'),
    ('CREATED',        'CANCELED',       'cancel_job'),
    ('SUBMITTED',      'DELIVERED',      'claim_job'),
    ('SUBMITTED',      'CANCELED',       'cancel_job'),
    ('DELIVERED',      'DELIVERED',      'claim_job when the lease expired'),
    ('DELIVERED',      'IN_PROGRESS',    'begin_job'),
    ('DELIVERED',      'SUBMITTED',      'fail_job to try again, release_job'),
    ('DELIVERED',      'FAILED',         'fail_job, claim_job when no attempt is left'),
    ('DELIVERED',      'CANCELED',       'cancel_job'),
    ('IN_PROGRESS',    'COMPLETED',      'complete_job'),
    ('IN_PROGRESS',    'AWAITING_HUMAN', 'await_human'),
    ('IN_PROGRESS',    'DELIVERED',      'claim_job when the lease expired'),
    ('IN_PROGRESS',    'SUBMITTED',      'fail_job to try again, release_job'),
    ('IN_PROGRESS',    'FAILED',         'fail_job, claim_job when no attempt is left'),
    ('IN_PROGRESS',    'CANCELED',       'cancel_job'),
    ('AWAITING_HUMAN', 'SUBMITTED',      'resume_job'),
    ('AWAITING_HUMAN', 'CANCELED',       'cancel_job'),
    ('FAILED',         'SUBMITTED',      'retry_job'),
    ('CANCELED',       'SUBMITTED',      'retry_job');

-- A job with any other status could never go on.
DO $walstream_body$
DECLARE
    strange CONSTANT text := (SELECT string_agg(DISTINCT j.status, ', ') FROM $jobs AS j WHERE NOT EXISTS (
        SELECT FROM $namespace.job_transitions AS t WHERE j.status IN (t.from_status, t.to_status)));
BEGIN
    IF strange IS NOT NULL THEN
        RAISE EXCEPTION 'walstream: there are jobs in % that have a status which is none of the state machine''s: %',
            $jobs_name, strange USING ERRCODE = 'WS004', HINT = 'Give them one that stands in docs/handoffs.md.';
    END IF;
END
$walstream_body$;

-- Any of the columns may have been there before, without what the functions rely on.
UPDATE $jobs
   SET priority = coalesce(priority, 0), attempts = coalesce(attempts, 0), hops = coalesce(hops, 0),
       max_delivery_attempts = coalesce(max_delivery_attempts, 5), updated_at = coalesce(updated_at, now()),
       fencing_token = coalesce(fencing_token, 0), created_at = coalesce(created_at, now())
 WHERE num_nulls(priority, attempts, hops, max_delivery_attempts, updated_at, fencing_token, created_at) > 0;
ALTER TABLE $jobs
    ALTER COLUMN status                SET DEFAULT 'SUBMITTED',
    ALTER COLUMN status                SET NOT NULL,
    ALTER COLUMN fencing_token         SET DEFAULT 0,
    ALTER COLUMN fencing_token         SET NOT NULL,
    ALTER COLUMN created_at            SET DEFAULT now(),
    ALTER COLUMN created_at            SET NOT NULL,
    ALTER COLUMN priority              SET DEFAULT 0,
    ALTER COLUMN priority              SET NOT NULL,
    ALTER COLUMN attempts              SET DEFAULT 0,
    ALTER COLUMN attempts              SET NOT NULL,
    ALTER COLUMN max_delivery_attempts SET DEFAULT 5,
    ALTER COLUMN max_delivery_attempts SET NOT NULL,
    ALTER COLUMN hops                  SET DEFAULT 0,
    ALTER COLUMN hops                  SET NOT NULL,
    ALTER COLUMN updated_at            SET DEFAULT now(),
    ALTER COLUMN updated_at            SET NOT NULL;

-- Named after the table, so that a stream that is set up again on the same jobs finds them.
DO $walstream_body$
DECLARE
    jobs CONSTANT regclass := $jobs_name;
    base CONSTANT text := (SELECT CASE WHEN length(c.relname) < 40 THEN c.relname ELSE md5(c.relname) END
                             FROM pg_catalog.pg_class AS c WHERE c.oid = jobs);
    wanted record;
BEGIN
    FOR wanted IN
        SELECT * FROM (VALUES
            -- One job a handoff, whoever routes it.
            ('UNIQUE', 'event', '(event_seq) WHERE event_seq IS NOT NULL'),
            -- What a claim walks along: however many jobs are finished, they are not in it.
            ('', 'claim', '(agent_id, priority DESC, created_at, job_id)'
                ' WHERE status IN (''SUBMITTED'', ''DELIVERED'', ''IN_PROGRESS'')'),
            -- What else goes on in a session, for the order within it.
            ('', 'session', '(session_id, created_at, job_id)'
                ' WHERE status IN (''SUBMITTED'', ''DELIVERED'', ''IN_PROGRESS'', ''AWAITING_HUMAN'')'),
            -- How many leases of an agent are alive.
            ('', 'lease', '(agent_id, lease_expires_at) WHERE status IN (''DELIVERED'', ''IN_PROGRESS'')'),
            -- Which job of a session was taken last, by which the router counts hops.
            ('', 'taken', '(session_id, job_id) WHERE fencing_token > 0')
        ) AS t (kind, suffix, definition)
    LOOP
        CONTINUE WHEN EXISTS (
            SELECT FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_class AS c ON c.oid = i.indexrelid
             WHERE i.indrelid = jobs AND c.relname = base || '_walstream_' || wanted.suffix
        );
        EXECUTE format(
            'CREATE %s INDEX %I ON %s %s', wanted.kind, base || '_walstream_' || wanted.suffix, jobs, wanted.definition
        );
    END LOOP;
END
$walstream_body$;

-- What a claim answers with.
CREATE TYPE $namespace.job AS (
    job_id bigint, session_id text, agent_id text, event_seq bigint, status text, priority integer, attempts integer,
    max_delivery_attempts integer, next_try timestamptz, hops integer, error text, lease_owner text,
    lease_expires_at timestamptz, fencing_token bigint, created_at timestamptz, updated_at timestamptz,
    finished_at timestamptz
);

-- Handoffs that nobody could be found for. References, never copies; they can be routed later.
CREATE TABLE $namespace.dead_letters (
    event_seq   bigint      PRIMARY KEY,
    session_id  text        NOT NULL,
    reason      text        NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    rerouted_at timestamptz
);
CREATE INDEX dead_letters_open ON $namespace.dead_letters (created_at) WHERE rerouted_at IS NULL;
