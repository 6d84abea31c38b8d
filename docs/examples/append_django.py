"""Append an event and do what it says, in one transaction: Django, with everything in one file.

python append_django.py        # and again: the second time nothing is booked twice
"""

import os
import uuid

import django
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

from walstream import Ledger, idempotency_key

parts = conninfo_to_dict(os.environ["WALSTREAM_DSN"])
settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts.get("dbname", ""),
            "USER": parts.get("user", ""),
            "PASSWORD": parts.get("password", ""),
            "HOST": parts.get("host", ""),
            "PORT": parts.get("port", ""),
        }
    }
)
django.setup()

from django.db import connection, models, transaction  # noqa: E402  # Django wants its settings first


class Booking(models.Model):
    session_id = models.UUIDField(primary_key=True)
    flight = models.TextField()

    class Meta:
        app_label = "trips"


if Booking._meta.db_table not in connection.introspection.table_names():
    with connection.schema_editor() as editor:
        editor.create_model(Booking)

session = uuid.uuid5(uuid.NAMESPACE_URL, "https://example.com/trips/django")
ledger = Ledger()

with transaction.atomic():
    done = ledger.append(
        session,
        "booker",
        "tool.observed",
        {"call_id": "call_1", "result": "booked LH 400"},
        key=idempotency_key(session, "call_1"),
        on=connection,
    )
    if done.appended:  # not if an earlier try went through
        Booking.objects.create(session_id=session, flight="LH 400")

print("appended" if done.appended else "was there already", "as seq", done.seq)
