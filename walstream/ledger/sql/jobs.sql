-- The functions of jobs (docs/handoffs.md). Like those of functions.sql they are made again whenever the schema is
-- migrated or another table is adopted.

-- Whoever writes the jobs, by whatever way: a status is one of the state machine's, and changes as it says.
CREATE OR REPLACE FUNCTION $namespace.check_job_status() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.status = 'PENDING' THEN
            NEW.status := 'SUBMITTED';   -- the name that the source design has for it
        ELSIF NOT EXISTS (
            SELECT FROM $namespace.job_transitions AS t WHERE NEW.status IN (t.from_status, t.to_status)
        ) THEN
            RAISE EXCEPTION 'walstream: a job has no status %', coalesce(NEW.status, 'NULL') USING ERRCODE = 'WS004';
        END IF;
    ELSIF NEW.status IS DISTINCT FROM OLD.status AND NOT EXISTS (
        SELECT FROM $namespace.job_transitions AS t WHERE t.from_status = OLD.status AND t.to_status = NEW.status
    ) THEN
        RAISE EXCEPTION 'walstream: job % is %, and cannot become %', OLD.job_id, OLD.status, coalesce(NEW.status, 'NULL')
            USING ERRCODE = 'WS004', HINT = 'The transitions stand in ' || $namespace_name || '.job_transitions.';
    END IF;
    RETURN NEW;
END
$walstream_body$;

-- One trigger a stream: it goes with the stream's schema.
DO $walstream_body$
BEGIN
    EXECUTE format(
        'CREATE OR REPLACE TRIGGER %I BEFORE INSERT OR UPDATE OF status ON %s FOR EACH ROW'
        ' EXECUTE FUNCTION %s.check_job_status()',
        'job_status_' || md5($namespace_name), $jobs_name, $namespace_name
    );
END
$walstream_body$;

-- A job for an agent in a session. The one of an event is made once, whoever asks: the second time answers with it.
CREATE OR REPLACE FUNCTION $namespace.submit_job(
    session_id text, agent_id text, event_seq bigint DEFAULT NULL, priority integer DEFAULT 0, hops integer DEFAULT 0,
    max_delivery_attempts integer DEFAULT 5, not_before timestamptz DEFAULT NULL,
    OUT job_id bigint, OUT created boolean
) RETURNS record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_session $jobs.session_id%TYPE := submit_job.session_id;
    v_status text;
BEGIN
    IF submit_job.session_id IS NULL OR coalesce(submit_job.agent_id, '') = '' THEN
        RAISE EXCEPTION 'walstream: a job needs a session and an agent' USING ERRCODE = 'invalid_parameter_value';
    ELSIF coalesce(submit_job.max_delivery_attempts, 0) < 1 THEN
        RAISE EXCEPTION 'walstream: max_delivery_attempts is 1 or more, not %', submit_job.max_delivery_attempts
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO $jobs AS j (session_id, agent_id, event_seq, priority, hops, max_delivery_attempts, next_try)
    VALUES (v_session, submit_job.agent_id, submit_job.event_seq, coalesce(submit_job.priority, 0),
            coalesce(submit_job.hops, 0), submit_job.max_delivery_attempts, submit_job.not_before)
        ON CONFLICT DO NOTHING
    RETURNING j.job_id INTO submit_job.job_id;
    created := FOUND;
    IF NOT created THEN
        SELECT j.job_id, j.status INTO submit_job.job_id, v_status FROM $jobs AS j
         WHERE j.event_seq = submit_job.event_seq;
        IF NOT FOUND THEN
            -- Only who reads by an older snapshot does not see it (REPEATABLE READ): the same transaction again does.
            RAISE EXCEPTION 'walstream: event % got its job by a transaction that this one does not see',
                submit_job.event_seq USING ERRCODE = 'serialization_failure';
        ELSIF v_status = 'CREATED' THEN
            UPDATE $jobs AS j SET status = 'SUBMITTED', updated_at = clock_timestamp()
             WHERE j.job_id = submit_job.job_id AND j.status = 'CREATED';
        END IF;
    END IF;
END
$walstream_body$;

REVOKE ALL ON FUNCTION $namespace.check_job_status() FROM PUBLIC;
REVOKE ALL ON FUNCTION $namespace.submit_job(text, text, bigint, integer, integer, integer, timestamptz) FROM PUBLIC;
