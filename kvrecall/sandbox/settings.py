"""Settings of compiling grammars: one frozen value, passed as an argument."""

from pydantic import BaseModel, ConfigDict, Field


class SandboxSettings(BaseModel):
    """Limits of one grammar, and of how many are compiled and wait, in each process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    processes: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Number of processes that compile grammars of clients: schemas of answers and strict "
        "tools, regular expressions. Each takes 20 MiB, in a worker another 60 to 200 for the "
        "vocabulary. Gateway and worker have their own; they start when they are needed.",
    )
    cpu_seconds: int = Field(
        default=1,
        ge=1,
        description="CPU seconds that compiling one grammar may take. One that needs more is refused as "
        "too complex.",
    )
    memory_bytes: int = Field(
        default=192 << 20,
        ge=1 << 20,
        description="Memory that compiling one grammar may take, in bytes. One that needs more is "
        "refused as too complex.",
    )
    grammar_bytes: int = Field(
        default=2 << 20,
        ge=1024,
        description="Maximum size of one grammar, in bytes: the schemas of an answer and of all tools "
        "that it may call.",
    )
    seconds: float = Field(
        default=10.0,
        gt=0,
        description="Time limit of compiling one grammar, in seconds, on a busy machine as well: the "
        "processes yield to turns. Over it the request is refused for now.",
    )
    max_waiting: int = Field(
        default=64,
        ge=1,
        description="Maximum number of grammars of one tenant that wait to be compiled. One of a tenant "
        "is compiled at a time, and tenants take turns.",
    )
    waiting_seconds: float = Field(
        default=2.0,
        gt=0,
        description="Time limit of waiting to be compiled, in seconds. Over it the request is refused "
        "for now.",
    )
