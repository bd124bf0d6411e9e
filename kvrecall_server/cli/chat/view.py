"""The lines that `kvrecall chat` prints about a session: its memory, its repairs, the commands."""

from rich.text import Text

from kvrecall.client import Memory, PastRepair, Repair, Session, Turn, TurnEpisode, TurnMemory
from kvrecall_server.cli.chat.sessions import NAME
from kvrecall_server.reporting.units import readable_bytes

HELP = """\
/help      these commands
/memory    the session's rows in each layer and its bytes in each tier
/repairs   the last repairs: their signals and the text whose rows were promoted
/quit      end the chat; so do an empty line and Ctrl-D
A message that begins with a slash is typed with two. Ctrl-C cancels a reply."""


def session_line(session: Session) -> str:
    """One line about the session that a chat is in, and since when it goes on."""
    name = session.metadata.get(NAME)
    shown = f"session {session.id}" if name is None else f"session {name} ({session.id})"
    if not session.turns:
        return shown
    began, last = (
        f"{at.astimezone():%Y-%m-%d %H:%M}" for at in (session.created_at, session.updated_at)
    )
    turns = f"{session.turns} turn{'s' * (session.turns > 1)}"
    return f"{shown} goes on: {turns}, {session.length} tokens, since {began}, last at {last}"


def memory_line(turn: Turn, seconds: float) -> str:
    """One line about a session's memory after a turn: rows, bytes, and the turn's seconds."""
    memory = turn.memory
    shown = [
        f"{memory.length} rows: {memory.active_rows} active of {memory.budget}",
        f"{memory.evicted_rows} evicted",
        f"{readable_bytes(memory.active_bytes)} active",
        f"{readable_bytes(max(memory.tier_bytes.values(), default=0))} stored",
        f"first token {turn.seconds_to_first_token:.2f} s of {seconds:.2f} s",
    ]
    if turn.retrieval is not None and turn.retrieval.refused:
        shown.append("no memory to retrieve from: the answer saw active rows alone")
    elif turn.retrieval is not None and turn.retrieval.steps:
        shown.append(f"{turn.retrieval.rows} rows retrieved in {turn.retrieval.steps} steps")
    if turn.remembered is not None:
        sessions = len(turn.remembered.sessions)
        shown.append(f"{turn.remembered.tokens} tokens of {sessions} sessions remembered")
    if turn.episode is not None:
        shown.append(_episode_text(turn.episode))
    return " · ".join(shown)


def memory_text(memory: Memory) -> str:
    """The session's current memory: rows and their limits, rows by layer, bytes by tier."""
    layers = memory.layer_active_rows
    by_layer = " ".join(map(str, layers)) or "none"
    if len(set(layers)) == 1:
        by_layer = f"{layers[0]} in every layer"
    tiers = " · ".join(f"{name} {readable_bytes(n)}" for name, n in memory.tier_bytes.items())
    lines = {
        "rows": f"{memory.length} in the session, {memory.evicted_rows} evicted, "
        f"{memory.promoted_rows} promoted",
        "active": f"{memory.active_rows} of a budget of {memory.budget}, at most "
        f"{memory.peak_rows} so far; the bound is {memory.bound_rows}",
        "by layer": by_layer,
        "bytes": f"{readable_bytes(memory.active_bytes)} active · stored: {tiers or 'none'}",
        "slot": "resident" if memory.in_slot else "swapped out",
    }
    return "\n".join(f"      {name:<9} {line}" for name, line in lines.items())


def repairs_line(memory: TurnMemory) -> str:
    """One line about the repairs since the previous turn.

    Of each: trigger, rows promoted and demoted, milliseconds, share of the evicted rows scanned.
    """
    shown = [_repair_line(repair) for repair in memory.repairs]
    if skipped := memory.repair.skipped:
        shown.append(f"{skipped} skipped")
    return "repaired on " + " · ".join(shown)


def repair_text(repair: PastRepair) -> Text:
    """One past repair: its signal, and its passages with the promoted text highlighted."""
    text = Text(f"      for turn {repair.turn}, {_repair_line(repair)}\n", style="dim")
    text.append(f"      signal: {_one_line(repair.signal)}", style="magenta")
    for passage in repair.passages:
        text.append(f"\n      {passage.start:>7}  …{_one_line(passage.before)}")
        text.append(_one_line(passage.promoted), style="bold green not dim")
        text.append(f"{_one_line(passage.after)}…")
    return text


def _repair_line(repair: Repair) -> str:
    moved = f"{repair.promoted} promoted, {repair.demoted} demoted"
    scanned = f"{repair.share_scanned:.0%} scanned" + (", truncated" if repair.truncated else "")
    return f"{repair.trigger}: {moved}, {repair.seconds * 1000:.0f} ms, {scanned}"


def _one_line(text: str) -> str:
    return text.replace("\n", "↵")


def _episode_text(episode: TurnEpisode) -> str:
    moved = f"{episode.rows_moved} rows moved, {readable_bytes(episode.bytes_moved)}"
    return f"episode {episode.episode}" + (f" ({moved})" if episode.switched else "")
