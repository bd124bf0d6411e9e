"""Jobs of requests: on rank 0 of a worker as a request comes, on the others as rank 0 tells of it."""

from typing import TypeAlias, cast

from google.protobuf.message import Message

from kvrecall.domain.fairness.share import Share
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.engine import Engine
from workers.engine.stored.page_naming import read_ids
from workers.episodes.build import run_build
from workers.repair.repair import run_pause_repair
from workers.scheduler.job import CommonWork, Job, JobKind, SlotWork, StoreWork
from workers.tasks.ahead import run_ahead
from workers.tasks.open import run_fork, run_open, run_rebuild
from workers.tasks.pages import read_age, run_delete_pages, run_list_pages
from workers.tasks.sensitivity import run_measurement
from workers.tasks.settle import run_settle
from workers.tasks.turn import Emit, run_turn

# Between turns nobody waits for it.
_IN_BACKGROUND = Share(background=True)

Request: TypeAlias = (
    pb.TurnRequest
    | pb.RepairRequest
    | pb.SettleRequest
    | pb.PrefillAheadRequest
    | pb.BuildEpisodesRequest
    | pb.OpenRequest
    | pb.ForkRequest
    | pb.RebuildRequest
    | pb.ListPagesRequest
    | pb.DeletePagesRequest
)
_Background: TypeAlias = (
    pb.RepairRequest | pb.SettleRequest | pb.PrefillAheadRequest | pb.BuildEpisodesRequest
)
_Opening: TypeAlias = pb.OpenRequest | pb.ForkRequest | pb.RebuildRequest
_OfPages: TypeAlias = pb.ListPagesRequest | pb.DeletePagesRequest


def build_job(engine: Engine, request: Request, emit: Emit = lambda _: None) -> Job:
    """Build the job of a request; emit: of a turn, gets its events on the scheduler's thread.

    Raises MalformedMessage.
    """
    job = _build(engine, request, emit)
    job.request = request
    return job


def build_measurement(engine: Engine) -> Job:
    """Build the job that measures the model's layers."""
    return Job("measure", "", 0, CommonWork(lambda: run_measurement(engine)), read_only=True)


def rebuild_job(engine: Engine, request: Message | None, number: int) -> Job:
    """Build a job that has entered on another rank."""
    job = build_measurement(engine)
    if request is not None:
        job = build_job(engine, cast("Request", request))
    job.number = number
    return job


def _build(engine: Engine, request: Request, emit: Emit) -> Job:
    if isinstance(request, pb.TurnRequest):
        turn = SlotWork(lambda resident: run_turn(engine, resident, request, emit))
        share = Share(flow=request.flow, background=request.background)
        return Job("turn", request.session, request.epoch, turn, share=share)
    if isinstance(request, pb.OpenRequest | pb.ForkRequest | pb.RebuildRequest):
        return _build_opening(engine, request)
    if isinstance(request, pb.ListPagesRequest | pb.DeletePagesRequest):
        return _build_of_pages(engine, request)
    return _build_background(engine, request)


def _build_background(engine: Engine, request: _Background) -> Job:
    """Build a job between turns, which may be asked to stop early."""

    def stop_requested() -> bool:
        return job.stop_requested

    kind: JobKind
    if isinstance(request, pb.RepairRequest):
        kind = "repair"
        work = SlotWork(lambda each: run_pause_repair(engine, each, request, stop_requested))
    elif isinstance(request, pb.PrefillAheadRequest):
        kind = "ahead"
        work = SlotWork(lambda each: run_ahead(engine, each, request, stop_requested))
    elif isinstance(request, pb.BuildEpisodesRequest):
        kind = "build"
        work = SlotWork(lambda each: run_build(engine, each, request))
    else:
        kind = "settle"
        work = SlotWork(lambda each: run_settle(engine, each))
    job = Job(
        kind,
        request.session,
        request.epoch,
        work,
        read_only=kind == "build",
        share=_IN_BACKGROUND,
    )
    return job


def _build_opening(engine: Engine, request: _Opening) -> Job:
    """Build a job that restores an empty session, in place of the session's other jobs."""
    spec = request.spec
    state = pb.SessionState() if isinstance(request, pb.ForkRequest) else request.state
    work: SlotWork | StoreWork
    if isinstance(request, pb.OpenRequest):
        work = StoreWork(lambda session: run_open(engine, session, request))
    elif isinstance(request, pb.ForkRequest):
        work = SlotWork(lambda child: run_fork(engine, child, request))
    else:
        work = SlotWork(lambda resident: run_rebuild(engine, resident, request))
    share = Share(spec.tenant, spec.session, spec.weight or 1.0)
    return Job("open", spec.session, spec.epoch, work, opening=(spec, state), share=share)


def _build_of_pages(engine: Engine, request: _OfPages) -> Job:
    """Build a job on the pages of all sessions. Raises MalformedMessage."""
    if isinstance(request, pb.ListPagesRequest):
        age = read_age(request)
        work = CommonWork(lambda: run_list_pages(engine, age))
    else:
        pages = read_ids(request.page_ids)
        work = CommonWork(lambda: run_delete_pages(engine, pages))
    return Job("pages", "", 0, work, read_only=True)
