"""Keys of writes: a tenant's own, with a fingerprint that stands for the body."""

from pydantic import BaseModel

from gateway.http.idempotency import build_idempotency_key


class Body(BaseModel):
    """The body of a request."""

    text: str = ""


def test_a_key_knows_its_tenant_under_whose_data_key_its_answer_is_encrypted() -> None:
    key = build_idempotency_key("ann", "POST /v1/sessions", "s", "k", Body(text="zebra"))
    assert (key.tenant, key.session, key.key) == ("ann", "s", "k")
    assert key.scope == "ann POST /v1/sessions"
    assert "zebra" not in repr(key)
    other = build_idempotency_key("ann", "POST /v1/sessions", "s", "k", Body(text="quagga"))
    assert other.fingerprint != key.fingerprint


def test_the_default_tenant_has_no_name() -> None:
    key = build_idempotency_key("", "POST /v1/sessions", "", "k", None)
    assert (key.tenant, key.scope) == ("", "POST /v1/sessions")
