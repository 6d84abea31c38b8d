-- The functions of approvals (docs/handoffs.md). Like those of jobs.sql they are made again whenever the schema is
-- migrated or another table is adopted.
--
-- A request is open while its job waits with the token that it had when it asked: whatever else happens to a job,
-- cancellation and every later claim, raises the token or ends the waiting. Whoever changes a request holds its job's
-- row, and then the lock of the session: the order of everybody who appends in a job's name.

-- A worker asks a person, and leaves the job until there is an answer. To be called last in the transaction that holds
-- what was done until then. Answers with the seq of the event, which is the number of the request.
CREATE OR REPLACE FUNCTION $namespace.request_approval(
    job_id bigint, token bigint, action jsonb, deadline timestamptz DEFAULT NULL, reason text DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_job CONSTANT $namespace.job := $namespace.hold_job(request_approval.job_id, token, false);
    v_said jsonb;
    v_seq bigint;
BEGIN
    IF coalesce(jsonb_typeof(action), 'null') = 'null' THEN
        RAISE EXCEPTION 'walstream: there has to be an action to be approved' USING ERRCODE = 'invalid_parameter_value';
    ELSIF NOT isfinite(deadline) THEN
        RAISE EXCEPTION 'walstream: a deadline is a moment, not %', deadline USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM $namespace.check_transition(v_job.job_id, v_job.status, 'AWAITING_HUMAN', 'await_human');
    v_said := jsonb_strip_nulls(jsonb_build_object(
        'deadline', to_char(timezone('UTC', deadline), 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), 'reason', reason
    ));
    SELECT a.seq INTO v_seq
      FROM $namespace.append(
               v_job.session_id, v_job.agent_id, 'approval.requested',
               jsonb_build_object('job_id', v_job.job_id, 'action', action) || v_said
           ) AS a;
    INSERT INTO $namespace.approvals (request_seq, job_id, fencing_token, session_id, agent_id, deadline)
    VALUES (v_seq, v_job.job_id, token, v_job.session_id, v_job.agent_id, deadline);
    PERFORM $namespace.await_human(v_job.job_id, token);
    RETURN v_seq;
END
$walstream_body$;

-- The event that answers, the decision, and the job goes on. The caller holds the job's row.
CREATE OR REPLACE FUNCTION $namespace.settle_approval(
    request bigint, decision text, decided_by text, edit jsonb, reason text
) RETURNS bigint
LANGUAGE plpgsql AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_job bigint;
    v_session text;
    v_seq bigint;
BEGIN
    SELECT a.job_id, a.session_id INTO STRICT v_job, v_session FROM $namespace.approvals AS a
     WHERE a.request_seq = request;
    SELECT a.seq INTO v_seq
      FROM $namespace.append(
               v_session, decided_by, 'approval.' || decision,
               jsonb_build_object('request', request, 'job_id', v_job, 'by', decided_by)
                   || CASE WHEN edit IS NULL THEN '{}' ELSE jsonb_build_object('edit', edit) END
                   || CASE WHEN reason IS NULL THEN '{}' ELSE jsonb_build_object('reason', reason) END
           ) AS a;
    UPDATE $namespace.approvals AS a
       SET decision = settle_approval.decision, decision_seq = v_seq, decided_by = settle_approval.decided_by,
           decided_at = clock_timestamp()
     WHERE a.request_seq = request;
    PERFORM $namespace.resume_job(v_job);
    RETURN v_seq;
END
$walstream_body$;

-- A person's decision, once: 'granted' (as it was asked, or with an edit in its place) or 'rejected'. The job goes on,
-- whichever it is. Answers with the seq of the event.
CREATE OR REPLACE FUNCTION $namespace.decide_approval(
    request_seq bigint, decision text, decided_by text, edit jsonb DEFAULT NULL, reason text DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_request $namespace.approvals%ROWTYPE;
    v_job $namespace.job;
BEGIN
    IF decision IS NULL OR decision NOT IN ('granted', 'rejected') THEN
        RAISE EXCEPTION 'walstream: a decision is granted or rejected, not %', coalesce(decision, 'NULL')
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF coalesce(decided_by, '') IN ('', 'deadline') THEN
        RAISE EXCEPTION 'walstream: a decision needs the name of who decides' USING ERRCODE = 'invalid_parameter_value';
    ELSIF edit IS NOT NULL AND (decision <> 'granted' OR jsonb_typeof(edit) = 'null') THEN
        RAISE EXCEPTION 'walstream: an edit is an action, and goes with granted' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT a.* INTO v_request FROM $namespace.approvals AS a WHERE a.request_seq = decide_approval.request_seq;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'walstream: there is no request % for an approval', coalesce(request_seq::text, 'NULL')
            USING ERRCODE = 'WS002';
    ELSIF v_request.decision IS NULL THEN
        v_job := $namespace.hold_job(v_request.job_id, NULL, true);
        SELECT a.* INTO v_request FROM $namespace.approvals AS a WHERE a.request_seq = decide_approval.request_seq;
    END IF;
    IF v_request.decision IS NOT NULL THEN
        RAISE EXCEPTION 'walstream: request % was % by % at % UTC', request_seq, v_request.decision,
            v_request.decided_by, to_char(timezone('UTC', v_request.decided_at), 'YYYY-MM-DD HH24:MI:SS')
            USING ERRCODE = 'WS005';
    ELSIF (v_job.status, v_job.fencing_token) IS DISTINCT FROM ('AWAITING_HUMAN', v_request.fencing_token) THEN
        RAISE EXCEPTION 'walstream: request % is stale: job % does not wait for it any more, and is %', request_seq,
            v_job.job_id, v_job.status USING ERRCODE = 'WS005';
    ELSIF v_request.deadline <= clock_timestamp() THEN
        RAISE EXCEPTION 'walstream: the deadline of request % passed at % UTC', request_seq,
            to_char(timezone('UTC', v_request.deadline), 'YYYY-MM-DD HH24:MI:SS') USING ERRCODE = 'WS005';
    END IF;
    RETURN $namespace.settle_approval(request_seq, decision, decided_by, edit, reason);
END
$walstream_body$;

-- Requests of an agent whose deadline has passed are rejected, and their jobs go on. For workers, now and then. Waits
-- for nobody: what another one holds is left to the next call. Answers with the jobs.
CREATE OR REPLACE FUNCTION $namespace.expire_approvals(agent_id text) RETURNS SETOF bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_now CONSTANT timestamptz := clock_timestamp();
    v_due record;
BEGIN
    FOR v_due IN
        SELECT a.request_seq, a.job_id, a.fencing_token, a.session_id
          FROM $namespace.approvals AS a JOIN $jobs AS j ON j.job_id = a.job_id
         WHERE a.agent_id = expire_approvals.agent_id AND a.decision IS NULL AND a.deadline <= v_now
           AND j.status = 'AWAITING_HUMAN' AND j.fencing_token = a.fencing_token
         ORDER BY a.deadline, a.request_seq LIMIT 100
    LOOP
        PERFORM FROM $jobs AS j
          WHERE j.job_id = v_due.job_id AND j.status = 'AWAITING_HUMAN' AND j.fencing_token = v_due.fencing_token
            FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        CONTINUE WHEN NOT pg_try_advisory_xact_lock($namespace.session_lock_key(v_due.session_id));
        PERFORM $namespace.settle_approval(v_due.request_seq, 'rejected', 'deadline', NULL, 'nobody decided in time');
        RETURN NEXT v_due.job_id;
    END LOOP;
END
$walstream_body$;

-- Who asks must not be able to answer: workers (`walstream init --worker`) and deciders (`--approver`) are two roles.
REVOKE ALL ON FUNCTION $namespace.request_approval(bigint, bigint, jsonb, timestamptz, text),
    $namespace.settle_approval(bigint, text, text, jsonb, text),
    $namespace.decide_approval(bigint, text, text, jsonb, text), $namespace.expire_approvals(text) FROM PUBLIC;
