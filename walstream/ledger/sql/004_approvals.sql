-- Migration 004: approvals (docs/handoffs.md): what a person was asked, by which job, and what was decided.
-- References, never copies: the action stands in the event that asked, an edit in the one that answered.

-- It belongs to the jobs, which a teardown leaves: so it may be there already, and is then kept.
CREATE TABLE IF NOT EXISTS $namespace.approvals (
    request_seq   bigint      PRIMARY KEY,                            -- the event that asked
    job_id        bigint      NOT NULL,
    fencing_token bigint      NOT NULL,                               -- that the job had then, and has while it waits
    session_id    text        NOT NULL,
    agent_id      text        NOT NULL,
    requested_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    deadline      timestamptz,                                        -- nobody can decide from then on
    decision      text        CHECK (decision IN ('granted', 'rejected')),
    decision_seq  bigint,                                             -- the event that answered
    decided_by    text,
    decided_at    timestamptz,
    CHECK (num_nulls(decision, decision_seq, decided_by, decided_at) IN (0, 4))
);
CREATE INDEX IF NOT EXISTS approvals_of_job ON $namespace.approvals (job_id, request_seq);
CREATE INDEX IF NOT EXISTS approvals_open ON $namespace.approvals (request_seq) WHERE decision IS NULL;
CREATE INDEX IF NOT EXISTS approvals_due ON $namespace.approvals (agent_id, deadline)
    WHERE decision IS NULL AND deadline IS NOT NULL;
