"""A stolen catalog tells nothing of conversations, and its owner reads all of it, through rotations of keys."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvrecall.domain.errors import CatalogError
from kvrecall.domain.messages import Message, ToolCall
from kvrecall.domain.repairs import DueRepair
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import RepairTrigger
from kvrecall.domain.tool_calls import CallStatus
from services.catalog.base import Catalog
from services.catalog.encryption.keyring import Keyring, make_line, parse_keyring
from services.catalog.records import (
    BuildCommit,
    EpisodeRecord,
    EpisodeSet,
    ForkCommit,
    IdempotencyKey,
    IdempotencyRecord,
    KeptState,
    RepairCommit,
    RepairDetails,
    SegmentRecord,
    SegmentsCommit,
    SettleCommit,
    TurnCommit,
)
from services.catalog.responses import StoredConversation, StoredItem, StoredResponse
from services.catalog.serialization import encode_tokens, pack

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]

# What a thief looks for: each word stands in one kind of value.
WORDS = (
    "question answer toolname arguments running result inline piece signal callsignal medoid built state settled"
    " vector centroid metadata tool salt template body opening historydigest item conversationmetadata"
    " idempotent fingerprint"
)
SECRETS = {word: f"zebra-{word}-quagga" for word in WORDS.split()}
TOKENS = (71_234_567, 81_234_567, 91_234_567)
HISTORY = "f00dfeed" * 8
OLD, NEW = make_line("old"), make_line("new")


def say(word: str) -> str:
    return SECRETS[word]


def build_turn(make_turn: MakeTurn, session: str, number: int, *calls: ToolCall) -> TurnCommit:
    """A turn whose texts and tokens are secrets."""
    made = make_turn(session, number, *calls)
    outcome = replace(made.turn.outcome, message=Message("assistant", say("answer"), calls))
    turn = replace(
        made.turn,
        messages=(Message("user", say("question")),),
        token_ids=TOKENS,
        outcome=outcome,
    )
    return replace(
        made,
        turn=turn,
        worker_state=say("state").encode(),
        history=HISTORY,
        kept=KeptState(pack(b"kept " + say("state").encode()), 16),
        repaired=RepairDetails(say("signal"), (1, 2)),
    )


def build_record(scope: str, session: str = "") -> IdempotencyRecord:
    key = IdempotencyKey(scope, "client-key", say("fingerprint"), session, "ann")
    return IdempotencyRecord(key, json.dumps(say("idempotent")))


class Life:
    """A session of a tenant with everything that a catalog stores, in secrets."""

    def __init__(self, catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn) -> None:
        self.catalog = catalog
        self._make_session = make_session
        self._make_turn = make_turn

    async def live(self) -> None:
        """Store all of it."""
        await self._begin()
        await self._pause()
        await self._repair()
        await self._remember()
        await self._respond()

    async def _begin(self) -> None:
        settings = {
            "tenant": "ann",
            "metadata": {"name": say("metadata")},
            "tools": (json.dumps({"name": say("tool")}),),
            "cache_salt": say("salt"),
            "template_arguments": json.dumps({"x": say("template")}),
        }
        session = self._make_session("s", **settings)
        await self.catalog.sessions.create(session, say("state").encode(), build_record("create"))
        call = ToolCall("c1", say("toolname"), say("arguments"))
        turn = build_turn(self._make_turn, "s", 1, call)
        await self.catalog.turns.commit(turn, 1, build_record("turn", "s"))

    async def _pause(self) -> None:
        call = await self.catalog.tool_calls.get("s", "c1")
        running = replace(call, started=True, arguments=say("running"))
        await self.catalog.tool_calls.commit("s", running, 1, None, (0, say("piece")))
        repair = DueRepair(RepairTrigger.TOOL_CALL, say("callsignal"), position=0)
        await self.catalog.repairs.commit("s", RepairCommit(repair), 1)
        done = replace(running, status=CallStatus.COMPLETED, result=say("result"), batch=1)
        await self.catalog.tool_calls.commit("s", done, 1, build_record("event", "s"))
        second = ToolCall("c2", say("toolname"), say("arguments"))
        await self.catalog.turns.commit(build_turn(self._make_turn, "s", 2, second), 1, None)
        inline = replace(build_turn(self._make_turn, "s", 3), inline_results={"c2": say("inline")})
        await self.catalog.turns.commit(inline, 1, None)

    async def _repair(self) -> None:
        turn = build_turn(self._make_turn, "s", 3).turn
        commit = RepairCommit(
            DueRepair(RepairTrigger.LAST_OUTPUT, say("signal")),
            say("state").encode(),
            turn.outcome.own_repair,
            turn.outcome.memory,
            RepairDetails(say("signal"), (3,)),
        )
        await self.catalog.repairs.commit("s", commit, 1)
        settled = SettleCommit(say("settled").encode(), turn.outcome.memory)
        await self.catalog.turns.commit_settled("s", settled, 1)

    async def _remember(self) -> None:
        episode = EpisodeRecord("e1", say("centroid").encode(), 1, 5, say("medoid"))
        segments = (SegmentRecord(0, 0, 5, say("vector").encode()),)
        added = EpisodeSet(segments=1, next_token=5, dimensions=3)
        await self.catalog.episodes.commit_segments("s", SegmentsCommit(segments, added), 1)
        built = replace(added, built_segments=1, builds=1, episodes=(episode,))
        build = BuildCommit(built, (say("built").encode(),), (0,))
        await self.catalog.episodes.commit_build("s", build, 1)
        session = await self.catalog.sessions.get("s")
        fork = ForkCommit(replace(session, id="fork"), "s", 3, say("state").encode())
        await self.catalog.sessions.fork(fork, None)

    async def _respond(self) -> None:
        response = StoredResponse(
            "r", "ann", "s", 3, say("opening"), say("historydigest"), 0, json.dumps(say("body"))
        )
        await self.catalog.responses.store(response, 600.0)
        metadata = {"about": say("conversationmetadata")}
        conversation = StoredConversation("conv", "ann", 1, metadata)
        await self.catalog.conversations.create(conversation, [StoredItem("i1", say("item"))])
        record = replace(build_record("items", "conv"))
        await self.catalog.conversations.add_items(
            "conv", [StoredItem("i2", say("item"))], None, record
        )

    async def tell(self, catalog: Catalog) -> str:
        """Read all of it from a catalog, as text."""
        read: list[Any] = []
        for session in ("s", "fork"):
            read.append(await catalog.sessions.get(session))
            read.append(await catalog.sessions.get_worker_state(session))
            read.append(await catalog.turns.get_after(session, 0, 9))
            read.append(await catalog.turns.get_token_ids(session))
            call = await catalog.tool_calls.get(session, "c1")
            read.append((call, await catalog.tool_calls.get_pieces(session, call, 0, 9)))
            read.append(await catalog.tool_calls.get(session, "c2"))
            read.append(await catalog.repairs.get_latest(session, 99))
            read.append(await catalog.episodes.get(session))
            read.append(await catalog.episodes.get_segments(session))
            read.append(await catalog.episodes.get_built(session, "e1"))
        read.append(await catalog.turns.get_state("s", 3))
        read.append(await catalog.histories.find([HISTORY]))
        read.append(await catalog.responses.get("r", "ann"))
        read.append(await catalog.conversations.get("conv", "ann"))
        read.append(await catalog.conversations.get_items("conv", None, 9, False))
        for scope, session in (("create", ""), ("turn", "s"), ("event", "s"), ("items", "conv")):
            read.append(await catalog.idempotency.get(build_record(scope, session).key))
        salts = [(await catalog.sessions.get(each)).settings.cache_salt for each in ("s", "fork")]
        return "\n".join(map(repr, [*read, *salts]))


def find_secrets(stolen: bytes) -> set[str]:
    """Find the secrets in what a thief has, token ids and digests too."""
    found = {word for word, text in SECRETS.items() if text.encode() in stolen}
    found |= {"zebra", "quagga"} if b"zebra" in stolen or b"quagga" in stolen else set()
    found |= {"tokens"} if encode_tokens(TOKENS[:1]) in stolen else set()
    return found | ({"history"} if HISTORY.encode() in stolen else set())


@pytest.fixture
def live(make_session: MakeSession, make_turn: MakeTurn) -> Callable[[Catalog], Life]:
    return lambda catalog: Life(catalog, make_session, make_turn)


async def test_the_secrets_are_all_stored_and_found_where_nothing_is_encrypted(
    place: Any, live: Callable[[Catalog], Life]
) -> None:
    catalog = await place.open(None)
    life = live(catalog)
    await life.live()
    # The latest worker state is the settled one, and a call's signal is of the call of a pause alone.
    told = await life.tell(catalog)
    assert {word for word in SECRETS if say(word) not in told} <= {"state", "fingerprint"}
    assert catalog.secret in place.steal()
    assert find_secrets(place.steal()) == {*SECRETS, "zebra", "quagga", "tokens", "history"}


async def test_no_secret_is_in_a_stolen_catalog(
    place: Any, live: Callable[[Catalog], Life], keyring: Keyring
) -> None:
    catalog = await place.open(keyring)
    life = live(catalog)
    await life.live()
    key = await catalog.data_keys.get_key("ann")
    stolen = place.steal()
    assert find_secrets(stolen) == set()
    assert catalog.secret not in stolen
    assert key is not None
    assert key not in stolen
    await place.close()
    assert find_secrets(place.steal()) == set()


async def test_all_is_read_with_the_key_as_it_is_without_encryption(
    place: Any, live: Callable[[Catalog], Life], keyring: Keyring
) -> None:
    life = live(await place.open(keyring))
    await life.live()
    told = await life.tell(await place.open(keyring))
    assert {word for word in SECRETS if say(word) not in told} <= {"state", "fingerprint"}
    assert str(TOKENS) in told


async def test_after_a_rotation_the_old_key_may_leave(
    place: Any, live: Callable[[Catalog], Life]
) -> None:
    life = live(await place.open(parse_keyring(OLD)))
    await life.live()
    told = await life.tell(life.catalog)
    rotated = await place.open(parse_keyring(f"{NEW}\n{OLD}"))
    assert rotated.secret == life.catalog.secret
    after = await place.open(parse_keyring(NEW))
    assert after.secret == life.catalog.secret
    assert await life.tell(after) == told


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "encrypted, with the key 'old', and no keys are given"),
        (NEW, "wrapped by the key 'old', which is not given"),
        (make_line("old"), "another key of the name 'old'"),
    ],
    ids=["none", "another name", "another key"],
)
async def test_without_the_key_a_catalog_is_refused_when_it_is_opened(
    place: Any, lines: str | None, said: str
) -> None:
    await place.open(parse_keyring(OLD))
    with pytest.raises(CatalogError, match=said):
        await place.open(None if lines is None else parse_keyring(lines))


async def test_a_plain_catalog_goes_on_encrypted(
    place: Any, live: Callable[[Catalog], Life], keyring: Keyring, make_session: MakeSession
) -> None:
    plain = live(await place.open(None))
    await plain.live()
    told = await plain.tell(plain.catalog)
    secret = plain.catalog.secret
    catalog = await place.open(keyring)
    assert catalog.secret == secret
    found = await plain.tell(catalog)
    assert found.replace(_FOUND_NOTHING, "") == told.replace(_HISTORY_FOUND, "")
    turn = build_turn(plain._make_turn, "s", 4)
    words = Message("user", "okapi at the water hole")
    await catalog.turns.commit(replace(turn, turn=replace(turn.turn, messages=(words,))), 1, None)
    assert (await catalog.turns.get_after("s", 2, 9))[-1].messages == (words,)
    assert b"okapi" not in place.steal()
    assert secret not in _without_freed_pages(place)


# A conversation is found under the name of its digest: one of before is appended to a new session.
_FOUND_NOTHING = "[]\n"
_HISTORY_FOUND = f"[HistoryEntry(digest={HISTORY!r}, session='s', turn=3)]\n"


def _without_freed_pages(place: Any) -> bytes:
    """What is stolen of Redis; a file's freed bytes may have what was plain once."""
    return b"" if place.path is not None else bytes(place.steal())
