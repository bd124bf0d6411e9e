"""What runs before a step of decoding, of an answer or of recorded text, when first run and replayed."""

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.generation.retrieval import prepare_retrieval
from workers.generation.settling import note_step
from workers.generation.steps import Steps
from workers.repair.reselection import StoredRows, reselect


def prepare_step(
    engine: Engine,
    resident: ResidentSession,
    output_tokens: int,
    report: pb.ReselectionReport,
    source: StoredRows | None = None,
) -> Steps[None]:
    """Re-select the session's rows if that is due, prepare the step to retrieve, and note what it reads.

    output_tokens: of the answer that have rows already. Adds to `report`. source: of the stored
    rows, the engine's store unless given. Raises the errors of the store.
    """
    yield from reselect(engine, resident, output_tokens, report, source)
    yield from prepare_retrieval(engine, resident, source)
    note_step(engine, resident)
