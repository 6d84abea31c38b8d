"""Append an event and do what it says, in one transaction: a Session of SQLAlchemy.

python append_sqlalchemy.py    # and again: the second time nothing is booked twice
"""

import os
import uuid

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from walstream import Ledger, idempotency_key


class Base(DeclarativeBase):
    pass


class Booking(Base):
    __tablename__ = "flight_bookings"
    session_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    flight: Mapped[str]


session_id = uuid.uuid5(uuid.NAMESPACE_URL, "https://example.com/trips/sqlalchemy")
ledger = Ledger()
engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(os.environ["WALSTREAM_DSN"]))
Base.metadata.create_all(engine)

with Session(engine) as session, session.begin():
    done = ledger.append(
        session_id,
        "booker",
        "tool.observed",
        {"call_id": "call_1", "result": "booked LH 400"},
        key=idempotency_key(session_id, "call_1"),
        on=session,
    )
    if done.appended:  # not if an earlier try went through
        session.add(Booking(session_id=session_id, flight="LH 400"))

print("appended" if done.appended else "was there already", "as seq", done.seq)
