"""Idempotency records, encrypted: the fingerprint of a request tells a guess of it, and the response is text."""

import base64
import json
from dataclasses import replace

from services.catalog.encryption.ciphers import Ciphers
from services.catalog.records import IdempotencyKey, IdempotencyRecord

# No JSON text begins with it.
_PREFIX = "kve1:"


async def seal_answer(
    tenants: Ciphers, record: IdempotencyRecord | None
) -> IdempotencyRecord | None:
    """Return a record as it is stored, without a fingerprint where it is encrypted."""
    if record is None:
        return None
    cipher = await tenants.to_write(record.key.tenant)
    text = json.dumps([record.key.fingerprint, record.response])
    sealed = cipher.seal_text(text, _get_place(record.key))
    if isinstance(sealed, str):
        return record
    response = _PREFIX + base64.b64encode(sealed).decode()
    return IdempotencyRecord(replace(record.key, fingerprint=""), response)


async def open_answer(
    tenants: Ciphers, key: IdempotencyKey, fingerprint: str, response: str
) -> tuple[str, str]:
    """Return the fingerprint and the response of a record as it is stored."""
    if not response.startswith(_PREFIX):
        return fingerprint, response
    cipher = await tenants.to_read(key.tenant)
    text = cipher.open_text(base64.b64decode(response.removeprefix(_PREFIX)), _get_place(key))
    opened: tuple[str, str] = tuple(json.loads(text))
    return opened


def _get_place(key: IdempotencyKey) -> str:
    return f"answer {key.scope} {key.key}"
