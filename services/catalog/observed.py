"""A catalog whose calls are timed, and whose outages and refusals of former writers are noticed."""

import inspect
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import structlog

from kvrecall.domain.errors import CatalogError, CatalogUnreachable, StaleEpoch
from kvrecall.domain.events import ServiceEvent, WriterFenced
from kvrecall.telemetry.outage import Outage
from services.catalog import base
from services.catalog.api_keys import ApiKeys
from services.catalog.encryption.data_keys import DataKeys
from services.catalog.responses import Responses, StoredConversations

_log = structlog.get_logger("kvrecall.catalog")

Kind = Literal["read", "list", "claim", "commit"]


@dataclass(frozen=True)
class CatalogCall:
    """A call of the catalog that ended; `failed`: the catalog could not do it."""

    kind: Kind
    seconds: float
    failed: bool


Publish = Callable[[ServiceEvent], None]
CallObserver = Callable[[CatalogCall], None]
# Calls that answer with many records, or look for some among all.
_LISTS = (
    "get_all",
    "get_page",
    "get_ids",
    "get_expired",
    "get_newest",
    "get_next",
    "get_idle_sessions",
    "get_dead",
)
_READS = ("get", "find", "count", "exist")


class ObservedCatalog:
    """`services.catalog.base.Catalog` that reports each call of another one to its observers.

    A former writer's refusal is an event of the service; the calls, some ten a turn, are not.

    Attributes:
        outage: Its lines in the log, few for the many calls that fail alike.
    """

    def __init__(self, catalog: base.Catalog, publish: Publish) -> None:
        self._catalog = catalog
        self._observers: list[CallObserver] = []
        self.outage = Outage(_log, "catalog failed", "catalog answers again")

        def observed(aggregate: Any, name: str) -> Any:
            return _Observed(aggregate, name, publish, self._observers, self.outage)

        self.sessions = cast("base.Sessions", observed(catalog.sessions, "sessions"))
        self.leases = cast("base.Leases", observed(catalog.leases, "leases"))
        self.turns = cast("base.Turns", observed(catalog.turns, "turns"))
        self.histories = cast("base.Histories", observed(catalog.histories, "histories"))
        self.responses = cast("Responses", observed(catalog.responses, "responses"))
        self.conversations = cast(
            "StoredConversations", observed(catalog.conversations, "conversations")
        )
        self.expiry = cast("base.Expiry", observed(catalog.expiry, "expiry"))
        self.memories = cast("base.Memories", observed(catalog.memories, "memories"))
        self.tool_calls = cast("base.ToolCalls", observed(catalog.tool_calls, "tool_calls"))
        self.repairs = cast("base.Repairs", observed(catalog.repairs, "repairs"))
        self.episodes = cast("base.Episodes", observed(catalog.episodes, "episodes"))
        self.pages = cast("base.Pages", observed(catalog.pages, "pages"))
        self.idempotency = cast("base.Idempotency", observed(catalog.idempotency, "idempotency"))
        self.data_keys = cast("DataKeys", observed(catalog.data_keys, "data_keys"))
        self.api_keys = cast("ApiKeys", observed(catalog.api_keys, "api_keys"))

    @property
    def id(self) -> str:
        """A random id, made with the catalog."""
        return self._catalog.id

    @property
    def secret(self) -> bytes:
        """Random bytes, made with the catalog."""
        return self._catalog.secret

    def observe(self, observer: CallObserver) -> None:
        """Call `observer` with every call from now on; it must neither block nor raise."""
        self._observers.append(observer)

    async def has_room(self) -> bool:
        """Return whether more may be stored."""
        return await self._catalog.has_room()

    async def close(self) -> None:
        """Finish running writes and close the storage."""
        await self._catalog.close()


def get_kind(aggregate: str, method: str) -> Kind:
    """The kind of a call, by the names of its aggregate and its method."""
    if aggregate == "leases" or method in ("claim", "release"):
        return "claim"
    if method in _LISTS:
        return "list"
    return "read" if method.startswith(_READS) else "commit"


class _Observed:
    """An aggregate of a catalog: its coroutine methods are timed, all else is passed through."""

    def __init__(
        self,
        aggregate: Any,
        name: str,
        publish: Publish,
        observers: list[CallObserver],
        outage: Outage,
    ) -> None:
        self._aggregate = aggregate
        self._name = name
        self._publish = publish
        self._observers = observers
        self._outage = outage

    def __getattr__(self, method: str) -> Any:
        if not inspect.iscoroutinefunction(call := getattr(self._aggregate, method)):
            return call
        observed = self._observe(method, get_kind(self._name, method))
        setattr(self, method, observed)  # the next look-up finds it
        return observed

    def _observe(self, method: str, kind: Kind) -> Callable[..., Awaitable[Any]]:
        async def observed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            failed = False
            try:
                found = await getattr(self._aggregate, method)(*arguments, **options)
                self._outage.end()
                return found
            except StaleEpoch:
                self._publish(WriterFenced("catalog"))
                raise
            except CatalogError as error:
                failed = True
                if isinstance(error, CatalogUnreachable):
                    self._outage.note(error.message)
                raise
            finally:
                call = CatalogCall(kind, time.perf_counter() - began, failed)
                for observe in self._observers:
                    observe(call)

        return observed
