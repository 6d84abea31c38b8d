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

REVOKE ALL ON FUNCTION $namespace.order_erasures() FROM PUBLIC;
