"""Exceptions: the class of each status, the members of a problem."""

import httpx
import pytest

from kvrecall import KvrecallClient
from kvrecall.client import (
    AccessDenied,
    Conflict,
    InvalidRequest,
    InvalidResponse,
    KvrecallError,
    NotFound,
    Overloaded,
    QuotaExceeded,
    ServerError,
    ServiceProblem,
    exceptions,
)
from kvrecall.domain.codes import ErrorCode

CLASSES = {
    400: InvalidRequest,
    401: AccessDenied,
    403: AccessDenied,
    404: NotFound,
    405: InvalidRequest,
    408: InvalidRequest,
    409: Conflict,
    413: InvalidRequest,
    415: InvalidRequest,
    421: InvalidRequest,
    422: InvalidRequest,
    429: Overloaded,
    500: ServerError,
    503: Overloaded,
    507: ServerError,
}


def client_of(response: httpx.Response) -> KvrecallClient:
    """Build a client that gets one response to every request."""
    transport = httpx.MockTransport(lambda request: response)
    return KvrecallClient("http://t", transport=transport)


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_code_has_a_class(code: ErrorCode) -> None:
    problem = exceptions.build_problem(code.http_status, {"code": code, "detail": "d"}, "")
    expected = QuotaExceeded if code == "quota_exceeded" else CLASSES[code.http_status]
    assert type(problem) is expected
    assert isinstance(problem, ServiceProblem)
    assert (problem.code, problem.status, problem.detail) == (code, code.http_status, "d")


def test_a_problem_keeps_its_further_members() -> None:
    problem = {"type": "urn:x", "title": "t", "status": 422, "code": "limit_exceeded"}
    members = {**problem, "detail": "too many", "field": "max_tokens", "limit": 5}
    with (
        client_of(httpx.Response(422, json=members)) as client,
        pytest.raises(InvalidRequest) as caught,
    ):
        client.worker()
    assert caught.value.details == {"field": "max_tokens", "limit": 5}
    assert str(caught.value) == "too many (422 limit_exceeded)"


def test_an_error_without_problem_details_has_its_reason() -> None:
    for response in (httpx.Response(502, text="<html>"), httpx.Response(502, json=[1])):
        with client_of(response) as client, pytest.raises(ServerError) as caught:
            client.worker()
        assert (caught.value.code, caught.value.detail) == ("http_error", "Bad Gateway")


@pytest.mark.parametrize("content", ["<html>", "[]", '{"model": "m"}', '{"repairs": 7}'])
def test_a_response_of_another_service_is_invalid(content: str) -> None:
    with client_of(httpx.Response(200, text=content)) as client:
        for request in (client.worker, lambda: client.repairs("s_1")):
            with pytest.raises(InvalidResponse) as caught:
                request()
            assert caught.value.code == "invalid_response"


def test_the_tree_of_the_docstring_is_the_tree_of_the_classes() -> None:
    classes = {
        kind.__name__
        for kind in vars(exceptions).values()
        if isinstance(kind, type) and issubclass(kind, KvrecallError)
    }
    assert exceptions.__doc__ is not None
    words = set(exceptions.__doc__.replace("│", " ").split())
    assert classes <= words
