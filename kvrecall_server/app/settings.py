"""Settings of all processes, from the command line and the environment (KVRECALL_...)."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.grpc.settings import GrpcSettings
from gateway.http.settings import GatewaySettings
from kvrecall.domain.limits import ServiceLimits
from kvrecall.sandbox.settings import SandboxSettings
from kvrecall_server.app.models import SMOLLM2, is_reference
from kvstore.settings import StoreSettings
from services.access.settings import AccessSettings
from services.catalog.encryption.settings import EncryptionSettings
from services.cluster.settings import WireSettings
from workers.engine.settings import WorkerSettings
from workers.rpc.settings import ServerSettings

Dtype = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["int8", "int4"]
DeviceMap = Literal["auto"]
LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


class Settings(BaseSettings):
    """Settings of the process and, nested, of its parts.

    In the environment: `KVRECALL_PORT=9000`, and of a part `KVRECALL_WORKER__BLOCK_TOKENS=256`.
    """

    model_config = SettingsConfigDict(
        env_prefix="KVRECALL_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        nested_model_default_partial_update=True,
    )

    model: str = Field(
        default=SMOLLM2,
        description="A causal LM: hub name, folder, GGUF file, `smollm2` or `reference`, a test instrument.",
    )
    dtype: Dtype | None = Field(
        default=None,
        description="Dtype of the weights. Unset: the checkpoint's own; float32 instead of bfloat16 "
        "without a GPU, on a CPU that has no instructions for it.",
    )
    quantize: Quantization | None = Field(
        default=None,
        description="Weights of the linear layers that decoding reads on a CPU; computes in bfloat16. "
        "Sessions of another quantization, or of none, are another model's.",
    )
    device_map: DeviceMap | None = Field(
        default=None,
        description="`auto` divides the layers between all GPUs of the machine, as accelerate does, for a "
        "model that one of them has no room for. Their slots are where they are. Unset: one GPU.",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="Processes, each on a device of its own, between which a worker divides the model's "
        "heads. The memory for stored rows is that of all of them on a machine.",
    )
    data: Path = Field(
        default=Path("kvrecall-data"), description="Data directory: catalog, pages and profiles."
    )
    catalog_url: SecretStr | None = Field(
        default=None,
        description="Redis with the catalog that several gateways share; URL as in "
        "KVRECALL_STORE__REDIS_URL, in the same namespace. Unset: a file in the data directory, "
        "of one process.",
    )
    catalog_reserve_bytes: int = Field(
        default=32 << 20,
        ge=0,
        description="Bytes of the disk that a catalog in a file leaves to deletions: it takes them "
        "in a file beside it, and stores no more when less than half as much is left besides. 0: none.",
    )
    ram_bytes: int | None = Field(
        default=None,
        ge=1 << 20,
        description="Host memory for stored rows, in bytes: the pages of sessions, each once. Open sessions "
        "hold those that prompts attend to, answers retrieve from, and repairs and re-selections scan, and "
        "the indexes over them: up to three quarters; the least recently used sessions make room, and one "
        "that finds none answers without retrieval, which its turn reports, and reads the stored pages "
        "for all else. The rest has the pages that were used last. Unset: a third of the memory of the "
        "machine or its container, at most what model and slots leave free.",
    )
    host: str = Field(default="127.0.0.1", description="Address that the HTTP API listens on.")
    api_key: SecretStr | None = Field(
        default=None,
        min_length=8,
        description="One key, with all rights, of the default tenant: for a service that needs no "
        "`kvrecall keys`. Clients and commands send it too.",
    )
    port: int = Field(
        default=8420, ge=0, le=65535, description="Port of the HTTP API; 0: any free one."
    )
    log: LogFormat = Field(default="console", description="Log format on standard error.")
    log_level: LogLevel = Field(
        default="info",
        description="Least level of log lines. Libraries log from `warning` on, with `debug` from "
        "`info` on; probes and scrapes are `debug`.",
    )
    store: StoreSettings = StoreSettings()
    worker: WorkerSettings = WorkerSettings()
    service: ServiceLimits = ServiceLimits()
    access: AccessSettings = AccessSettings()
    encryption: EncryptionSettings = EncryptionSettings()
    gateway: GatewaySettings = GatewaySettings()
    grpc: GrpcSettings = GrpcSettings()
    server: ServerSettings = ServerSettings()
    wire: WireSettings = WireSettings()
    sandbox: SandboxSettings = SandboxSettings()

    @property
    def is_reference_model(self) -> bool:
        """True if the packaged reference model is served."""
        return is_reference(self.model)
