"""What runs before a step of decoding, of an answer or of recorded text, when first run and replayed."""

from workers.capabilities import attach
from workers.capabilities.capability import NextStep
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.generation.exactness import note_step
from workers.generation.steps import Steps
from workers.repair.reselection import StoredRows


def prepare_step(
    engine: Engine,
    resident: ResidentSession,
    output_tokens: int,
    source: StoredRows | None = None,
) -> Steps[None]:
    """Let the session's capabilities prepare the step, and note what it reads.

    output_tokens: of the answer that have rows already. source: of the stored rows, the engine's
    store unless given. Raises the errors of the store.
    """
    step = NextStep(engine, resident, output_tokens, source)
    for capability in attach(resident.session):
        yield from capability.before_step(step)
    note_step(engine, resident)
