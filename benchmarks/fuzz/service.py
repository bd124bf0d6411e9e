"""The service under attack: a gateway and two workers with a wire token, and keys of two tenants."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from faults.rig.ports import free_port
from faults.rig.setups import Rig, Setup, files_only
from kvrecall_server.app.access import open_keys, require_pepper
from kvrecall_server.app.settings import Settings
from services.access.keys import digest_key, get_pepper_id, make_key
from services.access.principals import Scope
from services.catalog.api_keys import KeyRecord

WIRE_TOKEN = "the token of the fuzzed cluster"
# Rows that a tenant may hold: without a quota one tenant fills the disk for all.
TENANT_BYTES = 96 << 20
# An answer without a limit has the context's 16,000 tokens, and takes minutes.
MAX_TOKENS = 64
MALLORY, ANN, OPERATOR = "mallory", "ann", "operator"


@dataclass(frozen=True)
class Service:
    """Running processes, the address of the gRPC API, and a key of each tenant."""

    setup: Setup
    grpc: str
    keys: dict[str, str]

    @property
    def url(self) -> str:
        """Address of the gateway."""
        return self.setup.urls[0]

    @property
    def workers(self) -> list[str]:
        """Addresses of the workers' own ports."""
        return [f"127.0.0.1:{worker.port}" for worker in self.setup.workers]


@contextmanager
def running_service(folder: Path, rig: Rig) -> Iterator[Service]:
    """Run a service until the end of the block, then kill what is left of it."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = files_only(folder, rig)
    try:
        api = f"127.0.0.1:{free_port()}"
        for worker in setup.workers:
            own = {
                "KVRECALL_SERVER__TOKEN": WIRE_TOKEN,
                "KVRECALL_SERVER__ADVERTISE": f"127.0.0.1:{worker.port}",
            }
            worker.environment = {**worker.environment, **own}
        (gateway,) = setup.gateways
        # Past the proxies of faults: they are threads of this process, which draws requests.
        listed = list(gateway.arguments)
        listed[listed.index("--worker") + 1] = ",".join(
            f"127.0.0.1:{worker.port}" for worker in setup.workers
        )
        gateway.arguments = [*listed, "--grpc", api]
        gateway.environment = {
            **gateway.environment,
            "KVRECALL_WIRE__TOKEN": WIRE_TOKEN,
            "KVRECALL_SERVICE__TENANT_BYTES": str(TENANT_BYTES),
            "KVRECALL_SERVICE__DEFAULT_MAX_TOKENS": str(MAX_TOKENS),
            "KVRECALL_SERVICE__MAX_OUTPUT_TOKENS": str(MAX_TOKENS),
        }
        keys = asyncio.run(_make_keys(setup.catalog))
        setup.start()
        yield Service(setup, api, keys)
    finally:
        setup.close()


async def _make_keys(settings: Settings) -> dict[str, str]:
    """Write a key for each tenant to the catalog, as `kvrecall keys create` does."""
    assert settings.data is not None, "the set-up names it"
    settings.data.mkdir(parents=True, exist_ok=True)
    pepper = require_pepper(settings)
    made = {}
    async with open_keys(settings) as keys:
        for tenant in (MALLORY, ANN, OPERATOR):
            key = make_key()
            scopes = (Scope.ADMIN,) if tenant == OPERATOR else (Scope.INFER, Scope.SESSIONS)
            digest, pepper_id = digest_key(key, pepper), get_pepper_id(pepper)
            await keys.add(
                KeyRecord(key.id, digest, pepper_id, tenant, "fuzz", scopes, time.time(), None)
            )
            made[tenant] = key.text
    return made
