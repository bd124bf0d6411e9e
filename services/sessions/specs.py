"""A session's settings as its worker reads them."""

from collections.abc import Sequence

from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.page_ids import derive_row_key
from kvrecall.domain.sessions.commit_points import CommitPoint
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import SessionSettings
from kvrecall.protocol.convert import session_spec_to_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.base import Catalog


def build_spec(
    catalog: Catalog,
    limits: ServiceLimits,
    session: Session,
    epoch: int,
    history: Sequence[CommitPoint] = (),
) -> pb.SessionSpec:
    """Build the settings of a session under `epoch`, with its tenant's weight and its rows' key."""
    settings = session.settings
    weight = limits.get_weight(settings.tenant)
    row_key = derive_session_key(catalog, settings)
    return session_spec_to_wire(session, epoch, weight, row_key, history)


def derive_session_key(catalog: Catalog, settings: SessionSettings) -> bytes:
    """Derive the key by which a session's pages are named, of all that may share them."""
    return derive_row_key(catalog.secret, settings.tenant, settings.cache_salt)
