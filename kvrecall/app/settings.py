"""Everything an operator may choose, from the environment (KVRECALL_...) and the command line; passed as a value."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.settings import GatewaySettings
from kvrecall.domain.limits import ServiceLimits
from kvstore.settings import StoreSettings
from reference import MODEL_PATH
from services.cluster.settings import WireSettings
from workers.engine.settings import WorkerSettings
from workers.rpc.settings import ServerSettings

DEFAULTS = ServiceLimits()
"""What a session gets that names nothing."""

Dtype = Literal["float32", "bfloat16", "float16"]
LogFormat = Literal["console", "json"]


class Settings(BaseSettings):
    """The packages' settings and what joins them.

    `KVRECALL_PORT=9000`, and for a nested value `KVRECALL_WORKER__BLOCK_TOKENS=256`.
    """

    model_config = SettingsConfigDict(
        env_prefix="KVRECALL_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        nested_model_default_partial_update=True,
    )

    model: str = Field(default=str(MODEL_PATH), description="Path or hub name of a causal LM.")
    dtype: Dtype | None = Field(
        default=None, description="The weights' type; the checkpoint's own when not given."
    )
    data: Path = Field(
        default=Path("kvrecall-data"), description="Where sessions and their rows are kept."
    )
    catalog_url: SecretStr | None = Field(
        default=None,
        description="Redis that several gateways share as their catalog, in the forms of KVRECALL_STORE__REDIS_URL and "
        "under the same namespace. Unset: a file in the data directory, of one process.",
    )
    ram_bytes: int = Field(
        default=1 << 30, ge=1 << 20, description="Bytes of rows kept in memory beside the files."
    )
    host: str = "127.0.0.1"
    port: int = Field(default=8420, ge=0, le=65535, description="0: any free port.")
    log: LogFormat = "console"
    store: StoreSettings = StoreSettings()
    worker: WorkerSettings = WorkerSettings()
    service: ServiceLimits = ServiceLimits()
    gateway: GatewaySettings = GatewaySettings()
    server: ServerSettings = ServerSettings()
    wire: WireSettings = WireSettings()

    @property
    def is_reference_model(self) -> bool:
        """Whether the packaged model is served."""
        return Path(self.model) == MODEL_PATH
