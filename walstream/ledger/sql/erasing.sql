-- Declared removals (docs/ledger.md, "Erasing"). Made again whenever the schema is migrated or another table is adopted.

-- Declarations are committed in the order of their ids: whoever has read one has read all before it. The lock is taken
-- before the id is drawn, and held until the transaction ends.
CREATE OR REPLACE FUNCTION $namespace.order_erasures() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('erasures', hashtextextended($namespace_name, 0)));
    RETURN NULL;
END
$walstream_body$;
CREATE OR REPLACE TRIGGER order_erasures BEFORE INSERT ON $namespace.erasures
    FOR EACH STATEMENT EXECUTE FUNCTION $namespace.order_erasures();
ALTER TABLE $namespace.erasures ENABLE ALWAYS TRIGGER order_erasures;

-- A session and, if they are wanted, all that go on from it, sorted.
CREATE OR REPLACE FUNCTION $namespace.sessions_to_erase(session text, with_forks boolean) RETURNS text[]
LANGUAGE plpgsql STABLE AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_session $table.$session_id%TYPE := session;
BEGIN
    RETURN ARRAY(
        WITH RECURSIVE line (id) AS (
            SELECT v_session
             UNION
            SELECT f.session_id FROM line JOIN $namespace.forks AS f ON f.parent_id = line.id WHERE with_forks
        )
        SELECT line.id::text FROM line ORDER BY 1
    );
END
$walstream_body$;

-- The projectors whose last error may tell of these sessions: of what they had in hand when it came, or it is not known
-- what that was. Errors of our own words tell of nothing, and have an empty list.
CREATE OR REPLACE FUNCTION $namespace.projectors_that_tell(sessions text[]) RETURNS text[]
LANGUAGE plpgsql STABLE AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_each $table.$session_id%TYPE;
    v_text text;
    v_seqs bigint[];
    v_names text[];
BEGIN
    IF NOT EXISTS (
        SELECT FROM pg_catalog.pg_attribute AS a
         WHERE a.attrelid = ($namespace_name || '.projectors')::regclass AND a.attname = 'error_seqs'
    ) THEN
        RETURN ARRAY(SELECT p.name FROM $namespace.projectors AS p WHERE p.error <> $erased_error_name);
    END IF;
    v_names := ARRAY(
        SELECT p.name FROM $namespace.projectors AS p WHERE p.error <> $erased_error_name AND p.error_seqs IS NULL
    );
    v_seqs := ARRAY(
        SELECT DISTINCT s.seq FROM $namespace.projectors AS p, unnest(p.error_seqs) AS s (seq)
         WHERE p.error <> $erased_error_name
    );
    FOREACH v_text IN ARRAY sessions LOOP
        v_each := v_text;
        v_names := v_names || ARRAY(
            SELECT p.name FROM $namespace.projectors AS p
             WHERE p.error <> $erased_error_name AND p.error_seqs && ARRAY(
                       SELECT s.seq FROM unnest(v_seqs) AS s (seq)
                        WHERE EXISTS (SELECT FROM $table AS e WHERE e.$session_id = v_each AND e.$seq = s.seq)
                           OR EXISTS (SELECT FROM $namespace.erasures AS d
                                       WHERE d.session_id = v_text
                                         AND int8range(d.first_seq, nullif(d.last_seq, 9223372036854775807), '[]') @> s.seq)
                   )
        );
    END LOOP;
    RETURN ARRAY(SELECT DISTINCT n.name FROM unnest(v_names) AS n (name) ORDER BY 1);
END
$walstream_body$;

-- What an erasure would touch, place by place, and how many rows there; changes nothing and waits for nobody.
CREATE OR REPLACE FUNCTION $namespace.erasure_preview(session_id text, with_forks boolean DEFAULT false)
RETURNS TABLE (place text, touched bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_session $table.$session_id%TYPE := erasure_preview.session_id;
    v_sessions CONSTANT text[] := $namespace.sessions_to_erase(v_session::text, with_forks);
    v_line CONSTANT text[] := $namespace.sessions_to_erase(v_session::text, true);
    v_each $table.$session_id%TYPE;
    v_text text;
    v_counts bigint[] := '{0, 0, 0, 0, 0, 0, 0, 0, 0}';
    v_more bigint[];
    v_gone CONSTANT text := 'its session was erased';
BEGIN
    FOREACH v_text IN ARRAY v_line LOOP
        v_each := v_text;
        v_more := ARRAY[
            (SELECT count(*) FROM $table AS e WHERE e.$session_id = v_each),
            (SELECT count(*) FROM $table AS e
              WHERE e.$session_id = v_each AND e.$payload::text = $erased_payload_name),
            (SELECT count(*) FROM $namespace.messages AS m WHERE m.session_id = v_each),
            (SELECT count(*) FROM $jobs AS j WHERE j.session_id = v_each
                AND j.status IN ('CREATED', 'SUBMITTED', 'DELIVERED', 'IN_PROGRESS', 'AWAITING_HUMAN')),
            (SELECT count(*) FROM $jobs AS j WHERE j.session_id = v_each AND j.error <> v_gone
                AND j.status NOT IN ('CREATED', 'SUBMITTED', 'DELIVERED', 'IN_PROGRESS', 'AWAITING_HUMAN')),
            (SELECT count(*) FROM $namespace.append_keys AS k WHERE k.session_id = v_each
                AND k.key !~ '^erased:[0-9a-f]{64}$'),
            (SELECT count(*) FROM $namespace.parked AS p WHERE p.session_id = v_text
                AND (p.error <> v_gone OR p.traceback IS NOT NULL)),
            (SELECT count(*) FROM $namespace.dead_letters AS d WHERE d.session_id = v_text AND d.reason <> v_gone)
        ];
        -- Forks that are not erased lose their snapshots all the same: those hold what they have from here.
        v_counts[9] := v_counts[9] + (SELECT count(*) FROM $snapshots AS s WHERE s.session_id = v_each);
        IF v_text = ANY (v_sessions) THEN
            FOR i IN 1 .. 8 LOOP
                v_counts[i] := v_counts[i] + v_more[i];
            END LOOP;
        END IF;
    END LOOP;
    RETURN QUERY VALUES
        ('sessions', cardinality(v_sessions)::bigint), ('forks', cardinality(v_line)::bigint - 1),
        ('events', v_counts[1]), ('redacted already', v_counts[2]), ('messages', v_counts[3]),
        ('snapshots', v_counts[9]), ('open jobs', v_counts[4]), ('errors of jobs', v_counts[5]),
        ('idempotency keys', v_counts[6]), ('parked events', v_counts[7]), ('dead letters', v_counts[8]),
        ('errors of projectors',
            cardinality($namespace.projectors_that_tell(v_sessions))::bigint);
END
$walstream_body$;

-- Erases a session: redacts the payloads of its events, or removes them; with what else of ours holds them, and with
-- the declaration, in the caller's transaction. Of the sessions that go on from it either all are erased as well
-- (forks: 'erase') or none is ('keep'); there may be none if nothing is said. Answers with the places, and how many rows
-- were touched there. To be called in a transaction of its own; it can be called again.
CREATE OR REPLACE FUNCTION $namespace.erase_session(
    session_id text, reason text, mode text DEFAULT 'redact', forks text DEFAULT NULL, force boolean DEFAULT false
) RETURNS TABLE (place text, touched bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
#variable_conflict use_variable
DECLARE
    v_session $table.$session_id%TYPE := erase_session.session_id;
    v_each $table.$session_id%TYPE;
    v_sessions text[];
    v_text text;
    v_job record;
    v_tell text[];
    v_declared bigint;
    v_touched bigint;
    v_all bigint[] := '{0, 0, 0, 0, 0, 0, 0, 0, 0}';
    v_gone CONSTANT text := 'its session was erased';
BEGIN
    IF coalesce(btrim(reason), '') = '' THEN
        RAISE EXCEPTION 'walstream: an erasure needs a reason' USING ERRCODE = 'invalid_parameter_value';
    ELSIF mode IS NULL OR mode NOT IN ('redact', 'remove') THEN
        RAISE EXCEPTION 'walstream: an erasure is redact or remove, not %', coalesce(mode, 'NULL')
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF forks NOT IN ('erase', 'keep') THEN
        RAISE EXCEPTION 'walstream: forks are erased or kept: erase or keep, not %', forks
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        -- What others have just appended has to be seen once the session's lock is had.
        RAISE EXCEPTION 'walstream: sessions are erased under READ COMMITTED, and this transaction is %',
            upper(current_setting('transaction_isolation')) USING ERRCODE = 'invalid_transaction_state';
    END IF;

    -- Jobs first, then sessions: the order of everybody who appends in a job's name. A fork takes its parent's lock.
    LOOP
        v_sessions := $namespace.sessions_to_erase(v_session::text, coalesce(forks = 'erase', false));
        FOREACH v_text IN ARRAY v_sessions LOOP
            v_each := v_text;
            PERFORM FROM $jobs AS j WHERE j.session_id = v_each ORDER BY j.job_id FOR UPDATE;
        END LOOP;
        PERFORM pg_advisory_xact_lock(l.lock) FROM (
            SELECT DISTINCT $namespace.session_lock_key(s.id) AS lock FROM unnest(v_sessions) AS s (id) ORDER BY 1
        ) AS l;
        EXIT WHEN v_sessions = $namespace.sessions_to_erase(v_session::text, coalesce(forks = 'erase', false));
    END LOOP;
    IF forks IS NULL AND EXISTS (SELECT FROM $namespace.forks AS f WHERE f.parent_id = v_session) THEN
        RAISE EXCEPTION 'walstream: % sessions go on from session %, and their contexts hold what it had',
            cardinality($namespace.sessions_to_erase(v_session::text, true)) - 1, v_session
            USING ERRCODE = 'WS006', HINT = 'Say whether they are erased as well (erase) or not (keep).';
    END IF;
    -- A copy that is being filled, or was left behind, would take the place of the snapshots with what is erased here.
    SELECT format('%I.%I', n.nspname, c.relname) INTO v_text
      FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
     WHERE c.relkind = 'r' AND c.relname = (parse_ident($snapshots_name))[2]
       AND (starts_with(n.nspname, (parse_ident($namespace_name))[1] || '_rebuild_')
            OR starts_with(n.nspname, 'walstream_rebuild_'));
    IF FOUND THEN
        RAISE EXCEPTION 'walstream: % is a copy of the snapshots that a rebuild fills, or has left behind', v_text
            USING ERRCODE = 'WS006', HINT = 'Let the rebuild end, or drop the schema of the copy.';
    END IF;

    FOREACH v_text IN ARRAY v_sessions LOOP
        v_each := v_text;
        FOR v_job IN
            SELECT j.job_id, j.lease_owner,
                   j.status IN ('DELIVERED', 'IN_PROGRESS') AND j.lease_expires_at > clock_timestamp() AS at_work
              FROM $jobs AS j WHERE j.session_id = v_each
               AND j.status IN ('CREATED', 'SUBMITTED', 'DELIVERED', 'IN_PROGRESS', 'AWAITING_HUMAN')
             ORDER BY j.job_id
        LOOP
            IF v_job.at_work AND NOT coalesce(force, false) THEN
                RAISE EXCEPTION 'walstream: job % of session % is at work: % has its lease', v_job.job_id, v_each,
                    coalesce(v_job.lease_owner, 'somebody')
                    USING ERRCODE = 'WS006', HINT = 'Cancel it first, or force the erasure, which cancels it.';
            END IF;
            PERFORM $namespace.cancel_job(v_job.job_id, v_gone);
            v_all[4] := v_all[4] + 1;
        END LOOP;
        UPDATE $jobs AS j SET error = v_gone WHERE j.session_id = v_each AND j.error <> v_gone;
        GET DIAGNOSTICS v_touched = ROW_COUNT;
        v_all[5] := v_all[5] + v_touched;

        -- The declaration comes before the rows go: what guards the table asks for it.
        WITH held AS (
            SELECT e.$seq AS seq, e.$seq - row_number() OVER (ORDER BY e.$seq) AS island
              FROM $table AS e WHERE e.$session_id = v_each
               AND (mode = 'remove' OR e.$payload::text <> $erased_payload_name)
        ), declared AS (
            INSERT INTO $namespace.erasures AS d (first_seq, last_seq, reason, session_id, mode)
            SELECT min(h.seq), max(h.seq), reason, v_each::text,
                   CASE mode WHEN 'remove' THEN 'removed' ELSE 'redacted' END
              FROM held AS h GROUP BY h.island ORDER BY 1
            RETURNING d.last_seq - d.first_seq + 1 AS rows
        )
        SELECT coalesce(sum(d.rows), 0) INTO v_declared FROM declared AS d;
        IF mode = 'remove' THEN
            DELETE FROM $table AS e WHERE e.$session_id = v_each;
        ELSE
            UPDATE $table AS e SET $payload = $erased_payload_name
             WHERE e.$session_id = v_each AND e.$payload::text <> $erased_payload_name;
        END IF;
        GET DIAGNOSTICS v_touched = ROW_COUNT;
        IF v_touched <> v_declared THEN
            RAISE EXCEPTION 'walstream: % rows of session % were declared, and % were touched', v_declared, v_each, v_touched
                USING ERRCODE = 'triggered_data_change_violation',
                      HINT = 'A trigger or a rule on the ledger keeps them, or somebody inserted without its functions.';
        END IF;
        v_all[1] := v_all[1] + v_touched;

        DELETE FROM $namespace.messages AS m WHERE m.session_id = v_each;
        GET DIAGNOSTICS v_touched = ROW_COUNT;
        v_all[2] := v_all[2] + v_touched;
        -- A key can hold anything. Its hash still tells an append that is repeated (append_one).
        UPDATE $namespace.append_keys AS k SET key = $namespace.erased_key(k.key)
         WHERE k.session_id = v_each AND k.key !~ '^erased:[0-9a-f]{64}$';
        GET DIAGNOSTICS v_touched = ROW_COUNT;
        v_all[6] := v_all[6] + v_touched;
        UPDATE $namespace.parked AS p SET error = v_gone, traceback = NULL
         WHERE p.session_id = v_text AND (p.error <> v_gone OR p.traceback IS NOT NULL);
        GET DIAGNOSTICS v_touched = ROW_COUNT;
        v_all[7] := v_all[7] + v_touched;
        UPDATE $namespace.dead_letters AS d
           SET reason = v_gone, rerouted_at = coalesce(d.rerouted_at, clock_timestamp())
         WHERE d.session_id = v_text AND d.reason <> v_gone;
        GET DIAGNOSTICS v_touched = ROW_COUNT;
        v_all[8] := v_all[8] + v_touched;
    END LOOP;

    -- Who saves a snapshot holds this lock, and looks for erasures once it has it: what was folded before is read anew.
    PERFORM pg_advisory_xact_lock(
        hashtextextended('walstream:' || (parse_ident($namespace_name))[1] || ':snapshots', 0)
    );
    FOREACH v_text IN ARRAY $namespace.sessions_to_erase(v_session::text, true) LOOP
        v_each := v_text;
        DELETE FROM $snapshots AS s WHERE s.session_id = v_each;
        GET DIAGNOSTICS v_touched = ROW_COUNT;
        v_all[3] := v_all[3] + v_touched;
    END LOOP;
    -- They hold nothing of their parents any more: the event that said so is erased.
    FOREACH v_text IN ARRAY v_sessions LOOP
        v_each := v_text;
        DELETE FROM $namespace.forks AS f WHERE f.session_id = v_each;
    END LOOP;
    -- Last, because leases are renewed in these rows. Who writes an error locks his row first, and looks for erasures then.
    PERFORM FROM $namespace.projectors AS p ORDER BY p.name FOR NO KEY UPDATE;
    v_tell := $namespace.projectors_that_tell(v_sessions);
    UPDATE $namespace.projectors AS p SET error = $erased_error_name WHERE p.name = ANY (v_tell);
    GET DIAGNOSTICS v_touched = ROW_COUNT;
    RETURN QUERY VALUES
        ('sessions', cardinality(v_sessions)::bigint), ('events', v_all[1]), ('messages', v_all[2]),
        ('snapshots', v_all[3]), ('open jobs', v_all[4]), ('errors of jobs', v_all[5]), ('idempotency keys', v_all[6]),
        ('parked events', v_all[7]), ('dead letters', v_all[8]), ('errors of projectors', v_touched);
END
$walstream_body$;

-- What guards a ledger that was made append-only (`walstream init --append-only`): rows are changed and removed only by
-- a transaction that has declared it, and then in the declared way.
CREATE OR REPLACE FUNCTION $namespace.keep_append_only() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
DECLARE
    v_mode CONSTANT text := CASE TG_OP WHEN 'DELETE' THEN 'removed' ELSE 'redacted' END;
    v_row record;
    v_declared boolean;
BEGIN
    IF TG_OP <> 'TRUNCATE' THEN
        -- The range that begins last before it: of declarations that do not overlap no other one can hold it.
        SELECT e.last_seq >= OLD.$seq INTO v_declared FROM $namespace.erasures AS e
         WHERE e.xid = pg_current_xact_id()::text::bigint AND e.mode = v_mode AND e.first_seq <= OLD.$seq
         ORDER BY e.first_seq DESC LIMIT 1;
        IF v_declared IS FALSE THEN
            v_declared := EXISTS (
                SELECT FROM $namespace.erasures AS e
                 WHERE e.xid = pg_current_xact_id()::text::bigint AND e.mode = v_mode
                   AND OLD.$seq BETWEEN e.first_seq AND e.last_seq
            );
        END IF;
        IF v_declared AND TG_OP = 'DELETE' THEN
            RETURN OLD;
        ELSIF v_declared AND NEW.$payload::text = $erased_payload_name THEN
            v_row := OLD;   -- a redaction takes the payload, puts nothing else there, and leaves all others as they are
            v_row.$payload := NEW.$payload;
            RETURN v_row;
        END IF;
    END IF;
    RAISE EXCEPTION 'walstream: %.% is append-only, and % was not declared', TG_TABLE_SCHEMA, TG_TABLE_NAME,
        CASE TG_OP WHEN 'TRUNCATE' THEN 'a TRUNCATE' WHEN 'DELETE' THEN 'the DELETE of seq ' || OLD.$seq
                   ELSE 'the UPDATE of seq ' || OLD.$seq END
        USING ERRCODE = 'WS007', HINT = 'Sessions are erased with `walstream erase`.';
END
$walstream_body$;

-- Makes the ledger append-only, or what is new of it: every partition. Nobody but its owner keeps a privilege to change
-- rows, and a trigger stops the owner, too, also where session_replication_role skips others. Idempotent; for the owner.
CREATE OR REPLACE FUNCTION $namespace.make_append_only() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $walstream_body$
DECLARE
    v_root CONSTANT regclass := $table_name;
    v_rows CONSTANT name := 'append_only_' || md5($namespace_name);
    v_all CONSTANT name := 'append_only_truncate_' || md5($namespace_name);
    v_table regclass;
    v_trigger name;
    v_role text;
BEGIN
    FOR v_table IN
        SELECT v_root UNION ALL SELECT t.relid FROM pg_partition_tree(v_root) AS t WHERE t.relid <> v_root
    LOOP
        -- The one for rows is cloned to partitions by the server, the one for TRUNCATE is not.
        IF v_table = v_root AND NOT EXISTS (
            SELECT FROM pg_trigger AS g WHERE g.tgrelid = v_root AND g.tgname = v_rows
        ) THEN
            EXECUTE format('CREATE TRIGGER %I BEFORE UPDATE OR DELETE ON %s FOR EACH ROW'
                           ' EXECUTE FUNCTION %s.keep_append_only()', v_rows, v_table, $namespace_name);
        END IF;
        IF NOT EXISTS (SELECT FROM pg_trigger AS g WHERE g.tgrelid = v_table AND g.tgname = v_all) THEN
            EXECUTE format('CREATE TRIGGER %I BEFORE TRUNCATE ON %s FOR EACH STATEMENT'
                           ' EXECUTE FUNCTION %s.keep_append_only()', v_all, v_table, $namespace_name);
        END IF;
        FOR v_trigger IN
            SELECT g.tgname FROM pg_trigger AS g
             WHERE g.tgrelid = v_table AND g.tgname IN (v_rows, v_all) AND g.tgenabled <> 'A'
        LOOP
            EXECUTE format('ALTER TABLE ONLY %s ENABLE ALWAYS TRIGGER %I', v_table, v_trigger);
        END LOOP;
        FOR v_role IN
            SELECT DISTINCT CASE x.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(x.grantee)) END
              FROM pg_class AS c CROSS JOIN LATERAL (
                       SELECT a.grantee, a.privilege_type FROM aclexplode(c.relacl) AS a
                        UNION ALL
                       SELECT a.grantee, a.privilege_type FROM pg_attribute AS t, aclexplode(t.attacl) AS a
                        WHERE t.attrelid = c.oid
                   ) AS x
             WHERE c.oid = v_table AND x.grantee <> c.relowner AND x.privilege_type IN ('UPDATE', 'DELETE', 'TRUNCATE')
        LOOP
            EXECUTE format('REVOKE UPDATE, DELETE, TRUNCATE ON %s FROM %s CASCADE', v_table, v_role);
        END LOOP;
    END LOOP;
END
$walstream_body$;

-- Whoever may call them may take away what an agent did, so nobody may until it is granted.
REVOKE ALL ON FUNCTION $namespace.order_erasures(), $namespace.keep_append_only(), $namespace.make_append_only(),
    $namespace.sessions_to_erase(text, boolean), $namespace.projectors_that_tell(text[]) FROM PUBLIC;
REVOKE ALL ON FUNCTION $namespace.erasure_preview(text, boolean),
    $namespace.erase_session(text, text, text, text, boolean) FROM PUBLIC;
