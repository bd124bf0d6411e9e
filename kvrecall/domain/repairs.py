"""The repairs that a committed session state calls for."""

from dataclasses import dataclass

from kvrecall.domain.messages import Message
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import RepairTrigger
from kvrecall.domain.tool_calls import PendingCall


@dataclass(frozen=True)
class DueRepair:
    """A repair that the committed state calls for.

    Its signal is `text`, or `messages`, or the last `output` tokens of the last turn, or, with a
    `reach`, the end of the first `reach` characters of the tool's output.
    """

    trigger: RepairTrigger
    text: str = ""
    messages: tuple[Message, ...] = ()
    position: int = -1
    batch: int = 0
    reach: int = 0
    output: int = 0


SIGNAL_CHARACTERS = 65_536
"""The end of a tool's output that a repair before its result is conditioned on: 8,192 tokens of 8 characters."""


def due_repairs(session: Session) -> list[DueRepair]:
    """The repairs still to be run before the next turn, in the one order in which they are ever run.

    First one per call, in call order; then one per tool whose output has grown and whose result is not there yet;
    then one per arrival of results, with all results that had arrived by then. In a session that waits for no tool,
    one on its own last answer. A function of the committed state alone, so that a restart changes nothing.
    """
    due = {
        RepairTrigger.TOOL_CALL: [
            _call_repair(call) for call in session.calls if _call_is_new(call)
        ],
        RepairTrigger.TOOL_DELTA: [
            _delta_repair(call) for call in session.calls if _output_has_grown(call)
        ],
        RepairTrigger.TOOL_RESULT: [
            _result_repair(session, batch) for batch in _unrepaired_batches(session)
        ],
        RepairTrigger.LAST_OUTPUT: _output_repairs(session),
    }
    return [
        repair
        for trigger, found in due.items()
        if session.settings.repairs_on(trigger)
        for repair in found
    ]


def get_call_id(session: Session, repair: DueRepair) -> str:
    """Return the id of the one tool call that a repair is conditioned on; empty if there is none."""
    calls = [
        call
        for call in session.calls
        if call.position == repair.position or 0 < call.batch == repair.batch
    ]
    return calls[0].call.id if len(calls) == 1 else ""


def _call_is_new(call: PendingCall) -> bool:
    return call.call_signal != call.running.signal


def _call_repair(call: PendingCall) -> DueRepair:
    return DueRepair(RepairTrigger.TOOL_CALL, text=call.running.signal, position=call.position)


def _output_has_grown(call: PendingCall) -> bool:
    return call.result is None and call.delta_due > call.delta_repaired


def _delta_repair(call: PendingCall) -> DueRepair:
    return DueRepair(RepairTrigger.TOOL_DELTA, position=call.position, reach=call.delta_due)


def _unrepaired_batches(session: Session) -> list[int]:
    return sorted({call.batch for call in session.calls if call.batch and not call.result_repaired})


def _result_repair(session: Session, batch: int) -> DueRepair:
    arrived = tuple(call.result_message() for call in session.calls if 0 < call.batch <= batch)
    return DueRepair(RepairTrigger.TOOL_RESULT, messages=arrived, batch=batch)


def _output_repairs(session: Session) -> list[DueRepair]:
    due = session.output_due and not session.calls
    return [DueRepair(RepairTrigger.LAST_OUTPUT, output=session.output_due)] if due else []
