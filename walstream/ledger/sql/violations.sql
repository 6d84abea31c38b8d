-- Violations are committed in the order of their ids, whoever writes them (ingest, the audit sink, `walstream slot skip`):
-- the sink has read all before the last one that it has read. The lock is taken before the id is drawn, and held until the
-- transaction ends: each of them writes in one statement, so that a process that is stopped holds nobody up.
CREATE OR REPLACE FUNCTION $namespace.order_violations() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $walstream_body$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('violations', hashtextextended($namespace_name, 0)));
    RETURN NULL;
END
$walstream_body$;
CREATE OR REPLACE TRIGGER order_violations BEFORE INSERT ON $namespace.violations
    FOR EACH STATEMENT EXECUTE FUNCTION $namespace.order_violations();
ALTER TABLE $namespace.violations ENABLE ALWAYS TRIGGER order_violations;
REVOKE ALL ON FUNCTION $namespace.order_violations() FROM PUBLIC;
