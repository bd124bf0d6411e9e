"""Checks of grammars: whom the seconds of each are charged to."""

import asyncio
from collections.abc import Iterator

import pytest

from kvrecall.domain.events import GrammarCompiled
from kvrecall.sandbox.settings import SandboxSettings
from services.access.principals import Principal, acting_as, get_current_principal
from services.grammars import GrammarChecks

SCHEMA = '{"type": "object", "properties": {"a": {"type": "string"}}}'
ANN, BEN = Principal("ann"), Principal("ben")


@pytest.fixture
def charged() -> list[tuple[Principal | None, GrammarCompiled]]:
    """Who was charged for what."""
    return []


@pytest.fixture
def checks(charged: list[tuple[Principal | None, GrammarCompiled]]) -> Iterator[GrammarChecks]:
    """Checks that note whom they charge."""
    built = GrammarChecks(
        SandboxSettings(), lambda event: charged.append((get_current_principal(), event))
    )
    yield built
    built.close()


async def test_each_grammar_is_charged_once_to_the_sender_of_the_first_request(
    checks: GrammarChecks, charged: list[tuple[Principal | None, GrammarCompiled]]
) -> None:
    for sender in (ANN, BEN):
        with acting_as(sender):
            assert not (await checks.compile_schema(SCHEMA, sender.tenant)).problem
    await asyncio.sleep(0)
    [(charged_to, event)] = charged
    assert charged_to == ANN
    assert event.cpu_seconds > 0


async def test_a_grammar_that_is_refused_is_charged(
    checks: GrammarChecks, charged: list[tuple[Principal | None, GrammarCompiled]]
) -> None:
    with acting_as(BEN):
        assert (await checks.compile_schema('{"type": "nothing"}', "ben")).problem
    await asyncio.sleep(0)
    assert [sender for sender, _ in charged] == [BEN]
