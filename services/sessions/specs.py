"""A session's settings as its worker reads them."""

from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.page_ids import derive_page_key, derive_row_key
from kvrecall.domain.sessions.session import Session
from kvrecall.protocol.convert import session_spec_to_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.base import Catalog


async def build_spec(
    catalog: Catalog, limits: ServiceLimits, session: Session, epoch: int
) -> pb.SessionSpec:
    """Build the settings of a session under `epoch`, with its tenant's weight and its pages' keys.

    Raises CatalogError.
    """
    tenant = session.settings.tenant
    data_key = await catalog.data_keys.get_key(tenant)
    row_key = derive_row_key(catalog.secret, tenant, session.settings.cache_salt, data_key)
    weight = limits.get_weight(tenant)
    return session_spec_to_wire(session, epoch, weight, row_key, derive_page_key(data_key))
