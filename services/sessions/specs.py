"""A session's settings as its worker reads them."""

from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.page_ids import derive_row_key
from kvrecall.domain.sessions.session import Session
from kvrecall.protocol.convert import session_spec_to_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.base import Catalog


def build_spec(
    catalog: Catalog, limits: ServiceLimits, session: Session, epoch: int
) -> pb.SessionSpec:
    """Build the settings of a session under `epoch`, with its tenant's weight and its rows' key."""
    settings = session.settings
    weight = limits.get_weight(settings.tenant)
    row_key = derive_row_key(catalog.secret, settings.tenant, settings.cache_salt)
    return session_spec_to_wire(session, epoch, weight, row_key)
