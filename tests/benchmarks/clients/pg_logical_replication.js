// Drains a slot with the npm package pg-logical-replication, and exits after so many inserts.
// Arguments: connection (JSON: host, port, database, user, password), slot, publication, inserts.
const { LogicalReplicationService, PgoutputPlugin } = require("pg-logical-replication");

const [connection, slot, publication, inserts] = process.argv.slice(2);
let left = Number(inserts);
const service = new LogicalReplicationService(JSON.parse(connection), {
  acknowledge: { auto: true, timeoutSeconds: 10 },
});
service.on("data", (_lsn, message) => {
  if (message.tag === "insert" && --left === 0) process.exit(0);
});
service.on("error", (error) => {
  console.error(error);
  process.exit(1);
});
service.subscribe(new PgoutputPlugin({ protoVersion: 1, publicationNames: [publication] }), slot);
