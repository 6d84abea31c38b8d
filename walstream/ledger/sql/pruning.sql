-- Forgetting finished jobs (docs/handoffs.md). Made again with the functions of jobs.sql.

-- Forgets jobs that ended longer ago than this, the oldest numbers first, and keeps which event each came from. Answers
-- with how many they were: call it, and commit, until they are fewer than at_most.
CREATE OR REPLACE FUNCTION $namespace.prune_jobs(
    older_than interval, statuses text[] DEFAULT '{COMPLETED}', at_most integer DEFAULT 10000
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
DECLARE
    v_before CONSTANT timestamptz := clock_timestamp() - older_than;
    v_pruned bigint;
BEGIN
    IF coalesce(older_than, '-1 s') < '0 s' OR coalesce(at_most, 0) < 1 THEN
        RAISE EXCEPTION 'walstream: jobs are pruned from an age on, and one at a time at least'
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF NOT coalesce(statuses <@ '{COMPLETED,FAILED,CANCELED}', false) THEN
        RAISE EXCEPTION 'walstream: jobs are pruned that are COMPLETED, FAILED or CANCELED, not %',
            coalesce(statuses::text, 'NULL') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    WITH old AS MATERIALIZED (
        SELECT j.job_id, j.event_seq FROM $jobs AS j
         WHERE j.status = ANY (statuses) AND coalesce(j.finished_at, j.updated_at) < v_before
         ORDER BY j.job_id LIMIT at_most
           FOR UPDATE SKIP LOCKED
    ), kept AS (
        INSERT INTO $namespace.pruned_jobs (event_seq, job_id)
        SELECT o.event_seq, o.job_id FROM old AS o WHERE o.event_seq IS NOT NULL
            ON CONFLICT DO NOTHING
    ), settled AS (
        -- A handoff that got its job otherwise is no dead letter, now that the job does not say so any more.
        UPDATE $namespace.dead_letters AS d SET rerouted_at = clock_timestamp()
          FROM old AS o WHERE d.event_seq = o.event_seq AND d.rerouted_at IS NULL
    ), gone AS (
        DELETE FROM $jobs AS j USING old AS o WHERE j.job_id = o.job_id RETURNING j.job_id
    )
    SELECT count(*) INTO v_pruned FROM gone;
    RETURN v_pruned;
END
$walstream_body$;

REVOKE ALL ON FUNCTION $namespace.prune_jobs(interval, text[], integer) FROM PUBLIC;
