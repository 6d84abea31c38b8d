-- Migration 005: what is kept of a job that is forgotten: which event it came from, so that the event never gets another.
-- It belongs to the jobs, which a teardown leaves: so it may be there already, and is then kept.
CREATE TABLE IF NOT EXISTS $namespace.pruned_jobs (
    event_seq bigint PRIMARY KEY,
    job_id    bigint NOT NULL
);
