"""Messages back into bytes, written from the documentation alone (PostgreSQL, "Logical Replication Message Formats"):
what a decoded message says, said by somebody who has never seen the decoder.
"""

from __future__ import annotations

import struct

from walstream.protocol import messages as m


def encode(message: m.Message, *, empty_namespace: bool = False) -> bytes:
    """The payload that says ``message``.

    Args:
        empty_namespace: write ``pg_catalog`` the way the server does, as nothing.
    """
    match message:
        case m.Begin(final_lsn, time, xid):
            return struct.pack(">cQqI", b"B", final_lsn, time, xid)
        case m.Commit(commit_lsn, end_lsn, time):
            return struct.pack(">cBQQq", b"C", 0, commit_lsn, end_lsn, time)
        case m.Origin(commit_lsn, name):
            return struct.pack(">cQ", b"O", commit_lsn) + _name(name)
        case m.Relation(oid, namespace, name, identity, columns, xid):
            out = b"R" + _xid(xid) + struct.pack(">I", oid) + _namespace(namespace, empty_namespace) + _name(name)
            out += identity.encode() + struct.pack(">h", len(columns))
            for column in columns:
                out += struct.pack(">B", column.is_key) + _name(column.name)
                out += struct.pack(">Ii", column.type_oid, column.type_mod)
            return out
        case m.Type(oid, namespace, name, xid):
            return b"Y" + _xid(xid) + struct.pack(">I", oid) + _namespace(namespace, empty_namespace) + _name(name)
        case m.Insert(oid, new, xid):
            return b"I" + _xid(xid) + struct.pack(">I", oid) + b"N" + _row(new)
        case m.Update(oid, new, old, key_only, xid):
            before = b"" if old is None else (b"K" if key_only else b"O") + _row(old)
            return b"U" + _xid(xid) + struct.pack(">I", oid) + before + b"N" + _row(new)
        case m.Delete(oid, old, key_only, xid):
            return b"D" + _xid(xid) + struct.pack(">I", oid) + (b"K" if key_only else b"O") + _row(old)
        case m.Truncate(oids, cascade, restart, xid):
            flags = (1 if cascade else 0) + (2 if restart else 0)
            return b"T" + _xid(xid) + struct.pack(f">iB{len(oids)}I", len(oids), flags, *oids)
        case m.LogicalMessage(transactional, lsn, prefix, content, xid):
            head = struct.pack(">BQ", transactional, lsn) + _name(prefix)
            return b"M" + _xid(xid) + head + struct.pack(">i", len(content)) + content
        case m.StreamStart(xid, first):
            return struct.pack(">cIB", b"S", xid, first)
        case m.StreamStop():
            return b"E"
        case m.StreamCommit(xid, commit_lsn, end_lsn, time):
            return struct.pack(">cIBQQq", b"c", xid, 0, commit_lsn, end_lsn, time)
        case m.StreamAbort(xid, sub_xid, lsn, time):
            tail = b"" if lsn is None or time is None else struct.pack(">Qq", lsn, time)
            return struct.pack(">cII", b"A", xid, sub_xid) + tail
        case m.BeginPrepare(one, two, time, xid, gid):
            return struct.pack(">cQQqI", b"b", one, two, time, xid) + _name(gid)
        case m.RollbackPrepared(one, two, time, rollback_time, xid, gid):
            return struct.pack(">cBQQqqI", b"r", 0, one, two, time, rollback_time, xid) + _name(gid)
        case m.Prepare(one, two, time, xid, gid) | m.StreamPrepare(one, two, time, xid, gid):
            return struct.pack(">cBQQqI", message.TAG.encode(), 0, one, two, time, xid) + _name(gid)
        case m.CommitPrepared(one, two, time, xid, gid):
            return struct.pack(">cBQQqI", b"K", 0, one, two, time, xid) + _name(gid)


def _xid(xid: int | None) -> bytes:
    return b"" if xid is None else struct.pack(">I", xid)


def _name(name: str) -> bytes:
    return name.encode() + b"\0"


def _namespace(name: str, empty: bool) -> bytes:
    return b"\0" if empty and name == "pg_catalog" else _name(name)


def _row(values: m.TupleData) -> bytes:
    out = struct.pack(">h", len(values))
    for value in values:
        if value is None:
            out += b"n"
        elif value is m.UNCHANGED:
            out += b"u"
        elif isinstance(value, m.Binary):
            out += b"b" + struct.pack(">i", len(value.data)) + value.data
        else:
            assert isinstance(value, bytes)
            out += b"t" + struct.pack(">i", len(value)) + value
    return out
