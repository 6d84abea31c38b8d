#!/bin/sh
# Run by the image of Postgres when it makes its database: the login of the consumer and the one of the writers.
# `walstream init --grants walstream` grants the former what it needs in walstream's schema.
set -eu
psql --set ON_ERROR_STOP=1 --set password="$CONSUMER_PASSWORD" --username "${POSTGRES_USER:-postgres}" \
    --dbname "$POSTGRES_DB" --quiet <<'SQL'
CREATE ROLE walstream LOGIN REPLICATION PASSWORD :'password';
CREATE ROLE agents LOGIN PASSWORD :'password';
-- Projectors that bring tables of their own make them in a schema of their own.
CREATE SCHEMA projections AUTHORIZATION walstream;
ALTER ROLE walstream IN DATABASE :"DBNAME" SET search_path = projections, public;
-- The ledger is made by `walstream init`, which runs as this superuser: whatever table that makes, agents may append to.
ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT, INSERT ON TABLES TO agents;
ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT USAGE ON SEQUENCES TO agents;
SQL
