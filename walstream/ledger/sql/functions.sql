-- The functions that workers call, and what those are made of. They hold the names of the ledger's table and columns, so
-- they are made again whenever the schema is migrated or another table is adopted.

-- Who appends to a session waits here for whoever is at it, so that within a session seq order is commit order: the
-- lock is taken before the seq is drawn, and held until the transaction ends.
CREATE OR REPLACE FUNCTION $namespace.session_lock_key(session text) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $walstream_body$
    SELECT pg_catalog.hashtextextended(session, pg_catalog.hashtextextended($namespace_name, 0))
$walstream_body$;

-- What an append checks before anything else: the fencing token, if a job was named, and what durability is asked for.
CREATE OR REPLACE FUNCTION $namespace.begin_append(job bigint, token bigint, durability text) RETURNS void
LANGUAGE plpgsql AS $walstream_body$
#variable_conflict use_variable
DECLARE
    ranks CONSTANT text[] := ARRAY['off', 'local', 'remote_write', 'on', 'remote_apply'];
    current CONSTANT text := current_setting('synchronous_commit');
    before CONSTANT text := coalesce(current_setting('walstream.durability_before', true), '');
    actual bigint;
    standing text;
BEGIN
    IF job IS NOT NULL OR token IS NOT NULL THEN
        -- FOR SHARE: nobody can claim the job anew before this transaction has ended.
        SELECT j.fencing_token, j.status INTO actual, standing FROM $jobs AS j WHERE j.job_id = job FOR SHARE;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'walstream: there is no job %', coalesce(job::text, 'NULL') USING ERRCODE = 'WS002';
        ELSIF actual IS DISTINCT FROM token THEN
            RAISE EXCEPTION 'walstream: the fencing token % of job % is stale, its token is % now: another worker has it',
                coalesce(token::text, 'NULL'), job, actual USING ERRCODE = 'WS001';
        ELSIF standing NOT IN ('DELIVERED', 'IN_PROGRESS') THEN
            -- Given back, left to a person or finished: the token is the last one still, but nobody has the job.
            RAISE EXCEPTION 'walstream: job % is %, and the fencing token % is good for nothing any more', job, standing,
                token USING ERRCODE = 'WS001';
        END IF;
    END IF;
    -- synchronous_commit is the transaction's: of several appends in it the most demanding one decides, and one that
    -- asks for nothing demands what the transaction had before the first of them.
    IF durability NOT IN ('on', 'local', 'off') THEN
        RAISE EXCEPTION 'walstream: durability is on, local or off, not %', durability
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF before = '' THEN
        PERFORM set_config('walstream.durability_before', current, true);
        IF durability <> current THEN
            PERFORM set_config('synchronous_commit', durability, true);
        END IF;
    ELSIF array_position(ranks, coalesce(durability, before)) > array_position(ranks, current) THEN
        PERFORM set_config('synchronous_commit', coalesce(durability, before), true);
    END IF;
END
$walstream_body$;

-- A context window with each message replaced by its digest; the messages themselves are stored if they are new.
CREATE OR REPLACE FUNCTION $namespace.store_messages(session text, payload jsonb) RETURNS jsonb
LANGUAGE plpgsql AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_session $namespace.messages.session_id%TYPE := session;
    v_digests jsonb;
BEGIN
    IF jsonb_typeof(payload -> 'messages') IS DISTINCT FROM 'array' THEN
        RAISE EXCEPTION 'walstream: a payload without an array "messages" has none to be stored by digest'
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF payload ? 'message_digests' THEN
        RAISE EXCEPTION 'walstream: a payload whose messages are stored by digest cannot have a member "message_digests"'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    WITH each AS (
        SELECT m.message, m.place, sha256(convert_to(m.message::text, 'UTF8')) AS digest
          FROM jsonb_array_elements(payload -> 'messages') WITH ORDINALITY AS m (message, place)
    ), stored AS (
        INSERT INTO $namespace.messages (session_id, digest, message)
        SELECT DISTINCT ON (e.digest) v_session, e.digest, e.message FROM each AS e ORDER BY e.digest
            ON CONFLICT DO NOTHING
    )
    SELECT coalesce(jsonb_agg(encode(e.digest, 'hex') ORDER BY e.place), '[]') INTO v_digests FROM each AS e;
    RETURN (payload - 'messages') || jsonb_build_object('message_digests', v_digests);
END
$walstream_body$;

-- What stands for a key whose session was erased: it can be told by whoever has the key, and says nothing itself.
CREATE OR REPLACE FUNCTION $namespace.erased_key(key text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT AS $walstream_body$
    SELECT 'erased:' || pg_catalog.encode(pg_catalog.sha256(pg_catalog.convert_to(key, 'UTF8')), 'hex')
$walstream_body$;

-- One event, with the session's lock held. A key that is known answers with the row that it stands for.
CREATE OR REPLACE FUNCTION $namespace.append_one(
    session text, agent text, type text, body jsonb, idempotency_key text, store boolean,
    OUT seq bigint, OUT appended boolean, OUT created_at timestamptz, OUT stored jsonb
) RETURNS record
LANGUAGE plpgsql AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_session $table.$session_id%TYPE := session;
    v_body $table.$payload%TYPE;
    v_seq bigint;
BEGIN
    IF octet_length(idempotency_key) > 1024 THEN
        RAISE EXCEPTION 'walstream: a key has at most 1024 bytes, and this one has %', octet_length(idempotency_key)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Make it a hash of what it is made of.';
    ELSIF idempotency_key IS NOT NULL THEN
        SELECT k.seq INTO v_seq FROM $namespace.append_keys AS k
         WHERE k.session_id = v_session
           AND k.key IN (idempotency_key, $namespace.erased_key(idempotency_key));
        IF FOUND THEN
            appended := false;
            append_one.seq := v_seq;
            SELECT e.$created_at, e.$payload INTO created_at, stored FROM $table AS e
             WHERE e.$session_id = v_session AND e.$seq = v_seq;
            RETURN;
        END IF;
    END IF;
    IF store THEN
        IF type IS DISTINCT FROM 'context.loaded' THEN
            RAISE EXCEPTION 'walstream: messages are stored by digest for context.loaded, not for %', type
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        body := $namespace.store_messages(v_session::text, body);
    END IF;
    v_body := body;
    INSERT INTO $table AS e ($session_id, $agent_id, $event_type, $payload) VALUES (v_session, agent, type, v_body)
    RETURNING e.$seq, e.$created_at INTO v_seq, created_at;
    IF v_seq IS NULL THEN
        RAISE EXCEPTION 'walstream: the ledger took no row: a trigger or a rule on it keeps inserts away'
            USING ERRCODE = 'triggered_data_change_violation';
    END IF;
    append_one.seq := v_seq;
    appended := true;
    IF idempotency_key IS NOT NULL THEN
        -- The key can be there already only for who reads by an older snapshot (REPEATABLE READ, SERIALIZABLE). The
        -- clause makes that a serialization failure, which is what it is: the same transaction again finds the key.
        INSERT INTO $namespace.append_keys (session_id, key, seq) VALUES (v_session, idempotency_key, v_seq)
            ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'walstream: the key % was used by a transaction that this one does not see', idempotency_key
                USING ERRCODE = 'serialization_failure';
        END IF;
    END IF;
END
$walstream_body$;

-- What workers call, in whatever language, inside a transaction of their own (docs/ledger.md, "Append").
CREATE OR REPLACE FUNCTION $namespace.append(
    session_id text, agent_id text, event_type text, payload jsonb,
    key text DEFAULT NULL, job_id bigint DEFAULT NULL, fencing_token bigint DEFAULT NULL,
    durability text DEFAULT NULL, store_messages boolean DEFAULT false,
    OUT seq bigint, OUT appended boolean, OUT created_at timestamptz, OUT stored jsonb
) RETURNS record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_session $table.$session_id%TYPE := append.session_id;
BEGIN
    PERFORM $namespace.begin_append(append.job_id, append.fencing_token, append.durability);
    PERFORM pg_advisory_xact_lock($namespace.session_lock_key(v_session::text));
    SELECT o.seq, o.appended, o.created_at, o.stored
      INTO append.seq, append.appended, append.created_at, append.stored
      FROM $namespace.append_one(
               v_session::text, append.agent_id, append.event_type, append.payload, append.key, append.store_messages
           ) AS o;
END
$walstream_body$;

-- Several events at once, in the order in which they stand: an array of objects with the members session_id, agent_id,
-- event_type, payload, and, if wanted, key and store_messages. All of them, or none.
CREATE OR REPLACE FUNCTION $namespace.append_batch(
    events jsonb, job_id bigint DEFAULT NULL, fencing_token bigint DEFAULT NULL, durability text DEFAULT NULL
) RETURNS TABLE (place integer, seq bigint, appended boolean, created_at timestamptz, stored jsonb)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_session $table.$session_id%TYPE;
    v_event jsonb;
    v_text text;
    v_locks bigint[] := '{}';
    v_members CONSTANT text[] := '{session_id, agent_id, event_type, payload, key, store_messages}';
BEGIN
    PERFORM $namespace.begin_append(append_batch.job_id, append_batch.fencing_token, append_batch.durability);
    -- Every lock before the first seq, and in one order for everybody: two batches never wait for each other in a ring.
    FOR v_text IN SELECT DISTINCT e.value ->> 'session_id' FROM jsonb_array_elements(append_batch.events) AS e LOOP
        v_session := v_text;
        v_locks := v_locks || $namespace.session_lock_key(v_session::text);
    END LOOP;
    PERFORM pg_advisory_xact_lock(l.lock) FROM (SELECT DISTINCT u.lock FROM unnest(v_locks) AS u (lock) ORDER BY 1) AS l;
    append_batch.place := 0;
    FOR v_event IN SELECT e.value FROM jsonb_array_elements(append_batch.events) AS e LOOP
        append_batch.place := append_batch.place + 1;
        IF jsonb_typeof(v_event) <> 'object' OR v_event - v_members <> '{}' THEN
            RAISE EXCEPTION 'walstream: event % of the batch is no object of session_id, agent_id, event_type, payload,'
                ' key and store_messages', append_batch.place USING ERRCODE = 'invalid_parameter_value';
        END IF;
        v_session := v_event ->> 'session_id';
        SELECT o.seq, o.appended, o.created_at, o.stored
          INTO append_batch.seq, append_batch.appended, append_batch.created_at, append_batch.stored
          FROM $namespace.append_one(
                   v_session::text, v_event ->> 'agent_id', v_event ->> 'event_type', v_event -> 'payload',
                   v_event ->> 'key', coalesce((v_event ->> 'store_messages')::boolean, false)
               ) AS o;
        RETURN NEXT;
    END LOOP;
END
$walstream_body$;

-- What a key stands for, without appending anything: no row if it was not used. For who does not know whether an append
-- went through, and for projectors that are rebuilt.
CREATE OR REPLACE FUNCTION $namespace.appended(session_id text, key text)
RETURNS TABLE (seq bigint, created_at timestamptz, stored jsonb)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_session $table.$session_id%TYPE := appended.session_id;
BEGIN
    RETURN QUERY SELECT k.seq, e.$created_at, e.$payload::jsonb
      FROM $namespace.append_keys AS k
      LEFT JOIN $table AS e ON e.$session_id = v_session AND e.$seq = k.seq
     WHERE k.session_id = v_session AND k.key IN (appended.key, $namespace.erased_key(appended.key));
END
$walstream_body$;

-- A new session that goes on from a point of another one. Its first event says so; no event of the parent is copied.
CREATE OR REPLACE FUNCTION $namespace.fork(
    parent_id text, at_seq bigint, agent_id text, session_id text DEFAULT NULL,
    job_id bigint DEFAULT NULL, fencing_token bigint DEFAULT NULL,
    OUT session text, OUT seq bigint
) RETURNS record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_parent $table.$session_id%TYPE := fork.parent_id;
    v_child $table.$session_id%TYPE := coalesce(fork.session_id, gen_random_uuid()::text);
    v_at bigint;
BEGIN
    PERFORM $namespace.begin_append(fork.job_id, fork.fencing_token, NULL);
    PERFORM pg_advisory_xact_lock(l.lock) FROM (
        SELECT DISTINCT $namespace.session_lock_key(s.id) AS lock
          FROM (VALUES (v_parent::text), (v_child::text)) AS s (id) ORDER BY 1
    ) AS l;
    SELECT max(e.$seq) INTO v_at FROM $table AS e WHERE e.$session_id = v_parent AND e.$seq <= fork.at_seq;
    IF v_at IS NULL THEN
        RAISE EXCEPTION 'walstream: session % has no event up to seq %', fork.parent_id, fork.at_seq
            USING ERRCODE = 'WS003';
    END IF;
    IF EXISTS (SELECT FROM $table AS e WHERE e.$session_id = v_child) THEN
        RAISE EXCEPTION 'walstream: session % has events already, so it cannot begin as a fork', v_child
            USING ERRCODE = 'WS003';
    END IF;
    INSERT INTO $namespace.forks (session_id, parent_id, at_seq) VALUES (v_child, v_parent, v_at);
    SELECT v_child::text, o.seq INTO fork.session, fork.seq
      FROM $namespace.append_one(
               v_child::text, fork.agent_id, 'session.forked',
               jsonb_build_object('parent_session', v_parent::text, 'at_seq', v_at), NULL, false
           ) AS o;
END
$walstream_body$;

-- Whoever may call them may write the ledger, so nobody may until it is granted (`walstream init --worker ROLE`).
REVOKE ALL ON FUNCTION $namespace.session_lock_key(text), $namespace.begin_append(bigint, bigint, text),
    $namespace.store_messages(text, jsonb), $namespace.erased_key(text),
    $namespace.append_one(text, text, text, jsonb, text, boolean) FROM PUBLIC;
REVOKE ALL ON FUNCTION $namespace.append(text, text, text, jsonb, text, bigint, bigint, text, boolean) FROM PUBLIC;
REVOKE ALL ON FUNCTION $namespace.append_batch(jsonb, bigint, bigint, text) FROM PUBLIC;
REVOKE ALL ON FUNCTION $namespace.appended(text, text), $namespace.fork(text, bigint, text, text, bigint, bigint)
    FROM PUBLIC;
