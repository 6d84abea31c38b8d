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
    v_pruned bigint;
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
    IF created AND submit_job.event_seq IS NULL THEN
        RETURN;
    ELSIF NOT created THEN
        SELECT j.job_id, j.status INTO submit_job.job_id, v_status FROM $jobs AS j
         WHERE j.event_seq = submit_job.event_seq;
        IF FOUND THEN
            IF v_status = 'CREATED' THEN
                UPDATE $jobs AS j SET status = 'SUBMITTED', updated_at = clock_timestamp()
                 WHERE j.job_id = submit_job.job_id AND j.status = 'CREATED';
            END IF;
            RETURN;
        END IF;
    END IF;
    -- Its job may have been pruned, maybe at this very moment: so this is asked last.
    SELECT p.job_id INTO v_pruned FROM $namespace.pruned_jobs AS p WHERE p.event_seq = submit_job.event_seq;
    IF FOUND THEN
        DELETE FROM $jobs AS j WHERE created AND j.job_id = submit_job.job_id;
        submit_job.job_id := v_pruned;
        created := false;
    ELSIF NOT created THEN
        -- Only who reads by an older snapshot does not see it (REPEATABLE READ): the same transaction again does.
        RAISE EXCEPTION 'walstream: event % got its job by a transaction that this one does not see',
            submit_job.event_seq USING ERRCODE = 'serialization_failure';
    ELSIF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        -- What an older snapshot does not see is in the index all the same, and makes this fail as a serialization.
        INSERT INTO $namespace.pruned_jobs (event_seq, job_id) VALUES (submit_job.event_seq, submit_job.job_id)
            ON CONFLICT DO NOTHING;
        DELETE FROM $namespace.pruned_jobs AS p WHERE p.event_seq = submit_job.event_seq;
    END IF;
END
$walstream_body$;

-- A job's row, held until the transaction ends, for who has its lease; for anybody, if no token is asked for.
CREATE OR REPLACE FUNCTION $namespace.hold_job(job bigint, token bigint, anybody boolean) RETURNS $namespace.job
LANGUAGE plpgsql AS $walstream_body$
DECLARE
    held $namespace.job;
BEGIN
    SELECT j.job_id, j.session_id, j.agent_id, j.event_seq, j.status, j.priority, j.attempts, j.max_delivery_attempts,
           j.next_try, j.hops, j.error, j.lease_owner, j.lease_expires_at, j.fencing_token, j.created_at, j.updated_at,
           j.finished_at
      INTO held FROM $jobs AS j WHERE j.job_id = job FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'walstream: there is no job %', coalesce(job::text, 'NULL') USING ERRCODE = 'WS002';
    ELSIF NOT anybody AND held.fencing_token IS DISTINCT FROM token THEN
        RAISE EXCEPTION 'walstream: the fencing token % of job % is stale, its token is % now: another worker has it, or'
            ' it was canceled', coalesce(token::text, 'NULL'), job, held.fencing_token USING ERRCODE = 'WS001';
    END IF;
    RETURN held;
END
$walstream_body$;

-- Whether the state machine lets a function make this change of a job.
CREATE OR REPLACE FUNCTION $namespace.check_transition(job bigint, before text, after text, by text) RETURNS void
LANGUAGE plpgsql AS $walstream_body$
BEGIN
    IF NOT EXISTS (
        SELECT FROM $namespace.job_transitions AS t
         WHERE t.from_status = before AND t.to_status = after AND t.what ~ ('\m' || by || '\M')
    ) THEN
        RAISE EXCEPTION 'walstream: job % is %, and % cannot make it %', job, before, by, after
            USING ERRCODE = 'WS004', HINT = 'The transitions stand in ' || $namespace_name || '.job_transitions.';
    END IF;
END
$walstream_body$;

-- Whether something else goes on in a job's session, so that it has to wait. One that waits lets everything pass that
-- was begun, and what is older; one whose lease expired goes on before whatever only waits.
CREATE OR REPLACE FUNCTION $namespace.session_is_busy(
    session text, job bigint, since timestamptz, waits boolean, at timestamptz
) RETURNS boolean
LANGUAGE plpgsql STABLE AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_session $jobs.session_id%TYPE := session;
BEGIN
    RETURN EXISTS (
        SELECT FROM $jobs AS o
         WHERE o.session_id = v_session AND o.job_id <> job
           AND o.status IN ('SUBMITTED', 'DELIVERED', 'IN_PROGRESS', 'AWAITING_HUMAN')
           AND CASE o.status
                   WHEN 'AWAITING_HUMAN' THEN true
                   WHEN 'SUBMITTED' THEN waits AND (o.created_at, o.job_id) < (since, job)
                   ELSE waits OR coalesce(o.lease_expires_at > at, false) OR (o.created_at, o.job_id) < (since, job)
               END
    );
END
$walstream_body$;

-- The next job of an agent, for a worker that names itself as its owner; no row if there is none to be had now.
-- The caller commits, and has then the lease for so many seconds. Order: priority, then age.
CREATE OR REPLACE FUNCTION $namespace.claim_job(
    agent_id text, owner text, lease_seconds double precision DEFAULT 60, per_session boolean DEFAULT true,
    concurrency integer DEFAULT NULL
) RETURNS SETOF $namespace.job
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_now timestamptz;
    v_job record;
    v_expired boolean;
    v_once_more boolean;
    -- A cursor with a name, because a loop over a query looks at ten rows before the first is asked for.
    v_waiting CURSOR FOR
        SELECT j.job_id FROM $jobs AS j
         WHERE j.agent_id = claim_job.agent_id AND j.status IN ('SUBMITTED', 'DELIVERED', 'IN_PROGRESS')
           AND CASE j.status WHEN 'SUBMITTED' THEN coalesce(j.next_try <= v_now, true)
                             ELSE coalesce(j.lease_expires_at <= v_now, true) END
           AND CASE
               WHEN NOT per_session THEN true
               -- Of a long queue in one session all but the first are out by this, which costs less than the call.
               WHEN j.status = 'SUBMITTED' AND EXISTS (
                   SELECT FROM $jobs AS o
                    WHERE o.session_id = j.session_id
                      AND o.status IN ('SUBMITTED', 'DELIVERED', 'IN_PROGRESS', 'AWAITING_HUMAN')
                      AND (o.created_at, o.job_id) < (j.created_at, j.job_id)
               ) THEN false
               ELSE NOT $namespace.session_is_busy(
                   j.session_id::text, j.job_id, j.created_at, j.status = 'SUBMITTED', v_now
               ) END
         ORDER BY j.priority DESC, j.created_at, j.job_id
         LIMIT 1000;
    v_claimed $namespace.job;
BEGIN
    IF claim_job.agent_id IS NULL OR claim_job.owner IS NULL OR lease_seconds IS NULL OR lease_seconds <= 0 THEN
        RAISE EXCEPTION 'walstream: a claim needs an agent, an owner, and a lease of more than 0 seconds'
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        -- What others have just claimed has to be seen once its lock is had.
        RAISE EXCEPTION 'walstream: jobs are claimed under READ COMMITTED, and this transaction is %',
            upper(current_setting('transaction_isolation')) USING ERRCODE = 'invalid_transaction_state';
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN
        -- A token that a crash takes back would be given out again, and two workers would have the same.
        PERFORM set_config('synchronous_commit', 'local', true);
    END IF;
    IF concurrency IS NOT NULL THEN
        -- One at a time counts and claims.
        PERFORM pg_advisory_xact_lock(hashtextextended(claim_job.agent_id, hashtextextended($jobs_name || ' agent', 0)));
    END IF;
    LOOP
        v_now := clock_timestamp();
        v_once_more := false;
        IF concurrency <= (
            SELECT count(*) FROM $jobs AS j
             WHERE j.agent_id = claim_job.agent_id AND j.status IN ('DELIVERED', 'IN_PROGRESS')
               AND j.lease_expires_at > v_now
        ) THEN
            RETURN;
        END IF;
        FOR v_open IN v_waiting LOOP
            -- Another may have claimed it since: one row at a time is locked, so that nobody passes by a free one.
            SELECT j.job_id, j.session_id::text AS session_id, j.status, j.attempts, j.max_delivery_attempts, j.created_at
              INTO v_job FROM $jobs AS j
             WHERE j.job_id = v_open.job_id AND j.agent_id = claim_job.agent_id
               AND j.status IN ('SUBMITTED', 'DELIVERED', 'IN_PROGRESS')
               AND CASE j.status WHEN 'SUBMITTED' THEN coalesce(j.next_try <= v_now, true)
                                 ELSE coalesce(j.lease_expires_at <= v_now, true) END
               FOR UPDATE SKIP LOCKED;
            CONTINUE WHEN NOT FOUND;
            IF per_session THEN
                -- Who claims in the same session at this moment is not seen yet, but has the lock; afterwards it is seen.
                CONTINUE WHEN NOT pg_try_advisory_xact_lock(
                    hashtextextended(v_job.session_id, hashtextextended($jobs_name || ' session', 0))
                );
                CONTINUE WHEN $namespace.session_is_busy(
                    v_job.session_id, v_job.job_id, v_job.created_at, v_job.status = 'SUBMITTED', v_now
                );
            END IF;
            v_expired := v_job.status <> 'SUBMITTED' AND v_job.attempts >= v_job.max_delivery_attempts;
            PERFORM $namespace.check_transition(
                v_job.job_id, v_job.status, CASE WHEN v_expired THEN 'FAILED' ELSE 'DELIVERED' END, 'claim_job'
            );
            IF v_expired THEN
                UPDATE $jobs AS j
                   SET status = 'FAILED', fencing_token = j.fencing_token + 1, finished_at = v_now, updated_at = v_now,
                       error = format('the lease of %s expired at its last attempt, number %s',
                                      coalesce(j.lease_owner, 'nobody'), j.attempts),
                       lease_owner = NULL, lease_expires_at = NULL
                 WHERE j.job_id = v_job.job_id;
                v_once_more := true;   -- its session may go on now
                EXIT;
            END IF;
            UPDATE $jobs AS j
               SET status = 'DELIVERED', fencing_token = j.fencing_token + 1, attempts = j.attempts + 1,
                   lease_owner = claim_job.owner, next_try = NULL, updated_at = v_now,
                   lease_expires_at = clock_timestamp() + make_interval(secs => lease_seconds)
             WHERE j.job_id = v_job.job_id
            RETURNING j.job_id, j.session_id, j.agent_id, j.event_seq, j.status, j.priority, j.attempts,
                      j.max_delivery_attempts, j.next_try, j.hops, j.error, j.lease_owner, j.lease_expires_at,
                      j.fencing_token, j.created_at, j.updated_at, j.finished_at
                 INTO v_claimed;
            RETURN NEXT v_claimed;
            RETURN;
        END LOOP;
        EXIT WHEN NOT v_once_more;
    END LOOP;
END
$walstream_body$;

-- The worker has begun.
CREATE OR REPLACE FUNCTION $namespace.begin_job(job_id bigint, token bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_job CONSTANT $namespace.job := $namespace.hold_job(begin_job.job_id, token, false);
BEGIN
    PERFORM $namespace.check_transition(v_job.job_id, v_job.status, 'IN_PROGRESS', 'begin_job');
    UPDATE $jobs AS j SET status = 'IN_PROGRESS', updated_at = clock_timestamp() WHERE j.job_id = v_job.job_id;
END
$walstream_body$;

-- What a worker begins with, in one call: claim_job, begin_job, and the event that says so in the job's session, one for
-- each handoff, however often it is tried. What is wrong with a job, or with the ledger, keeps nobody else waiting: the
-- job is given back, for so many seconds, and no attempt is counted. It comes as a row that says why under "refused".
-- "more" says whether others of the agent wait, so that it is worth the while to wake another worker.
CREATE OR REPLACE FUNCTION $namespace.take_job(
    agent_id text, owner text, lease_seconds double precision DEFAULT 60, per_session boolean DEFAULT true,
    concurrency integer DEFAULT NULL, retry_after double precision DEFAULT 1
) RETURNS TABLE (
    job $namespace.job, from_session text, from_agent text, event_type text, payload text, refused text, more boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_payload jsonb;
    v_patience text;
BEGIN
    SELECT c.* INTO take_job.job FROM $namespace.claim_job(
        take_job.agent_id, take_job.owner, take_job.lease_seconds, take_job.per_session, take_job.concurrency
    ) AS c;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    BEGIN
        -- begin_job, but for its questions: the claim has just answered them.
        UPDATE $jobs AS j SET status = 'IN_PROGRESS' WHERE j.job_id = job.job_id;
        job.status := 'IN_PROGRESS';
        IF job.event_seq IS NOT NULL THEN
            SELECT e.$session_id::text, e.$agent_id::text, e.$event_type::text, e.$payload::text
              INTO from_session, from_agent, take_job.event_type, payload
              FROM $table AS e WHERE e.$seq = job.event_seq;
        END IF;
        IF payload IS NOT NULL THEN
            BEGIN
                v_payload := payload;
            EXCEPTION WHEN OTHERS THEN
                v_payload := NULL;   -- a json that no jsonb can hold: the event then says nothing of what it has to say
            END;
            -- Somebody may be at the session for long, and the claim holds up the agent's others if they are counted.
            v_patience := current_setting('lock_timeout');
            PERFORM set_config('lock_timeout', '300ms', true);
            PERFORM $namespace.append(
                job.session_id, job.agent_id, 'handoff.received',
                jsonb_build_object(
                    'handoff', job.event_seq, 'job_id', job.job_id, 'from', from_agent,
                    -- What it has to say: its message, else all that neither the router nor the queue reads.
                    'message', CASE WHEN jsonb_typeof(v_payload) <> 'object' THEN v_payload
                                    WHEN v_payload ? 'message' THEN v_payload -> 'message'
                                    ELSE v_payload - '{to, target, agent, session_id, hops, priority}'::text[] END
                ),
                'handoff.received:' || job.event_seq, job.job_id, job.fencing_token
            );
            PERFORM set_config('lock_timeout', v_patience, true);
        END IF;
    EXCEPTION WHEN OTHERS THEN
        refused := SQLERRM;
    END;
    IF refused IS NOT NULL THEN
        PERFORM $namespace.release_job(job.job_id, job.fencing_token, retry_after, refused);
    END IF;
    more := EXISTS (
        SELECT FROM $jobs AS j
         WHERE j.agent_id = take_job.agent_id AND j.status = 'SUBMITTED' AND j.job_id <> job.job_id
           AND coalesce(j.next_try <= clock_timestamp(), true)
    );
    RETURN NEXT;
END
$walstream_body$;

-- The worker is alive. False, and nothing is changed, if it has the lease no longer: it should stop.
CREATE OR REPLACE FUNCTION $namespace.renew_job(job_id bigint, token bigint, lease_seconds double precision DEFAULT 60)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
BEGIN
    IF lease_seconds IS NULL OR lease_seconds <= 0 THEN
        RAISE EXCEPTION 'walstream: a lease has more than 0 seconds' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    UPDATE $jobs AS j SET lease_expires_at = clock_timestamp() + make_interval(secs => lease_seconds)
     WHERE j.job_id = renew_job.job_id AND j.fencing_token = token AND j.status IN ('DELIVERED', 'IN_PROGRESS');
    RETURN FOUND;
END
$walstream_body$;

-- Done. To be called last in the transaction that holds what was done. Answers with the agent whose turn it is now in
-- the session, if somebody waits there: after the commit its workers may be woken.
DO $walstream_body$
BEGIN
    IF to_regprocedure($namespace_name || '.complete_job(bigint, bigint)')::regproc IN (
        SELECT p.oid FROM pg_catalog.pg_proc AS p WHERE p.prorettype = 'void'::regtype
    ) THEN
        DROP FUNCTION $namespace.complete_job(bigint, bigint);   -- as the release before had it
    END IF;
END
$walstream_body$;
CREATE OR REPLACE FUNCTION $namespace.complete_job(job_id bigint, token bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_job CONSTANT $namespace.job := $namespace.hold_job(complete_job.job_id, token, false);
    v_session CONSTANT $jobs.session_id%TYPE := v_job.session_id;
BEGIN
    PERFORM $namespace.check_transition(v_job.job_id, v_job.status, 'COMPLETED', 'complete_job');
    UPDATE $jobs AS j
       SET status = 'COMPLETED', lease_owner = NULL, lease_expires_at = NULL, error = NULL,
           finished_at = clock_timestamp(), updated_at = clock_timestamp()
     WHERE j.job_id = v_job.job_id;
    RETURN (
        SELECT j.agent_id FROM $jobs AS j
         WHERE j.session_id = v_session AND j.status = 'SUBMITTED' ORDER BY j.created_at, j.job_id LIMIT 1
    );
END
$walstream_body$;

-- A turn's end in one call: the events of the turn (as for append_batch), and complete_job.
CREATE OR REPLACE FUNCTION $namespace.finish_job(job_id bigint, token bigint, events jsonb DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
BEGIN
    IF events IS NOT NULL THEN
        PERFORM $namespace.append_batch(events, finish_job.job_id, token);
    END IF;
    RETURN $namespace.complete_job(finish_job.job_id, token);
END
$walstream_body$;

-- It did not work: once more after so many seconds, if an attempt is left; for good, if NULL. Answers with the status.
CREATE OR REPLACE FUNCTION $namespace.fail_job(
    job_id bigint, token bigint, error text, retry_after double precision DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_job CONSTANT $namespace.job := $namespace.hold_job(fail_job.job_id, token, false);
    v_again CONSTANT boolean := retry_after IS NOT NULL AND v_job.attempts < v_job.max_delivery_attempts;
    v_status CONSTANT text := CASE WHEN v_again THEN 'SUBMITTED' ELSE 'FAILED' END;
BEGIN
    PERFORM $namespace.check_transition(v_job.job_id, v_job.status, v_status, 'fail_job');
    UPDATE $jobs AS j
       SET status = v_status, lease_owner = NULL, lease_expires_at = NULL, error = fail_job.error,
           next_try = CASE WHEN v_again THEN clock_timestamp() + make_interval(secs => greatest(retry_after, 0)) END,
           finished_at = CASE WHEN NOT v_again THEN clock_timestamp() END, updated_at = clock_timestamp()
     WHERE j.job_id = v_job.job_id;
    RETURN v_status;
END
$walstream_body$;

-- Nothing was wrong with the job, and no attempt is counted: the worker stops, and somebody else may have it at once; or
-- what it needs is away, and it is tried again after so many seconds.
DROP FUNCTION IF EXISTS $namespace.release_job(bigint, bigint);   -- as the release before had it
CREATE OR REPLACE FUNCTION $namespace.release_job(
    job_id bigint, token bigint, retry_after double precision DEFAULT NULL, error text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_job CONSTANT $namespace.job := $namespace.hold_job(release_job.job_id, token, false);
BEGIN
    PERFORM $namespace.check_transition(v_job.job_id, v_job.status, 'SUBMITTED', 'release_job');
    UPDATE $jobs AS j
       SET status = 'SUBMITTED', lease_owner = NULL, lease_expires_at = NULL,
           next_try = CASE WHEN retry_after IS NOT NULL
                           THEN clock_timestamp() + make_interval(secs => greatest(retry_after, 0)) END,
           error = coalesce(release_job.error, j.error), attempts = greatest(j.attempts - 1, 0),
           updated_at = clock_timestamp()
     WHERE j.job_id = v_job.job_id;
END
$walstream_body$;

-- A person has to decide. Nothing is held meanwhile: no lease, no timer, no process.
CREATE OR REPLACE FUNCTION $namespace.await_human(job_id bigint, token bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_job CONSTANT $namespace.job := $namespace.hold_job(await_human.job_id, token, false);
BEGIN
    PERFORM $namespace.check_transition(v_job.job_id, v_job.status, 'AWAITING_HUMAN', 'await_human');
    UPDATE $jobs AS j
       SET status = 'AWAITING_HUMAN', lease_owner = NULL, lease_expires_at = NULL, updated_at = clock_timestamp()
     WHERE j.job_id = v_job.job_id;
END
$walstream_body$;

-- A person has decided: any worker goes on. What was delivered until now went well, so attempts begin anew.
CREATE OR REPLACE FUNCTION $namespace.resume_job(job_id bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_job CONSTANT $namespace.job := $namespace.hold_job(resume_job.job_id, NULL, true);
BEGIN
    PERFORM $namespace.check_transition(v_job.job_id, v_job.status, 'SUBMITTED', 'resume_job');
    UPDATE $jobs AS j SET status = 'SUBMITTED', attempts = 0, next_try = NULL, updated_at = clock_timestamp()
     WHERE j.job_id = v_job.job_id;
END
$walstream_body$;

-- Nobody is to do it any more. Who is at it can write nothing from here on: its token is stale. (One that nobody ever
-- had keeps its 0, which says that it was never taken.)
CREATE OR REPLACE FUNCTION $namespace.cancel_job(job_id bigint, reason text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_job CONSTANT $namespace.job := $namespace.hold_job(cancel_job.job_id, NULL, true);
BEGIN
    PERFORM $namespace.check_transition(v_job.job_id, v_job.status, 'CANCELED', 'cancel_job');
    UPDATE $jobs AS j
       SET status = 'CANCELED', fencing_token = j.fencing_token + (j.fencing_token > 0)::integer, lease_owner = NULL,
           lease_expires_at = NULL, error = reason, next_try = NULL, finished_at = clock_timestamp(), updated_at = clock_timestamp()
     WHERE j.job_id = v_job.job_id;
END
$walstream_body$;

-- Once more, from the beginning, for a job that failed for good or was canceled.
CREATE OR REPLACE FUNCTION $namespace.retry_job(job_id bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_job CONSTANT $namespace.job := $namespace.hold_job(retry_job.job_id, NULL, true);
BEGIN
    PERFORM $namespace.check_transition(v_job.job_id, v_job.status, 'SUBMITTED', 'retry_job');
    UPDATE $jobs AS j
       SET status = 'SUBMITTED', attempts = 0, next_try = NULL, finished_at = NULL, updated_at = clock_timestamp()
     WHERE j.job_id = v_job.job_id;
END
$walstream_body$;

-- Wakes the workers of an agent that wait for a job, or of all agents if none is named. To be called in a transaction of
-- its own, after the one that submitted, resumed or finished the job has committed: a NOTIFY takes a lock of the whole
-- cluster for as long as its transaction takes to commit. Workers look by themselves now and then, woken or not.
CREATE OR REPLACE FUNCTION $namespace.wake_workers(agent_id text DEFAULT NULL) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
    SELECT pg_notify($jobs_channel_name, left(coalesce(agent_id, ''), 1000))
$walstream_body$;

-- Nobody may move a job until it is granted (`walstream init --worker ROLE`).
REVOKE ALL ON FUNCTION $namespace.check_job_status(), $namespace.hold_job(bigint, bigint, boolean),
    $namespace.check_transition(bigint, text, text, text),
    $namespace.session_is_busy(text, bigint, timestamptz, boolean, timestamptz) FROM PUBLIC;
REVOKE ALL ON FUNCTION $namespace.submit_job(text, text, bigint, integer, integer, integer, timestamptz),
    $namespace.claim_job(text, text, double precision, boolean, integer),
    $namespace.take_job(text, text, double precision, boolean, integer, double precision), $namespace.begin_job(bigint, bigint),
    $namespace.renew_job(bigint, bigint, double precision), $namespace.complete_job(bigint, bigint),
    $namespace.finish_job(bigint, bigint, jsonb),
    $namespace.fail_job(bigint, bigint, text, double precision), $namespace.release_job(bigint, bigint, double precision, text),
    $namespace.await_human(bigint, bigint), $namespace.resume_job(bigint), $namespace.cancel_job(bigint, text),
    $namespace.retry_job(bigint), $namespace.wake_workers(text) FROM PUBLIC;
