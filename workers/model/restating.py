"""What a chat template says otherwise of earlier answers now: the reasoning that it drops.

The tokens of a log are compared with pieces of a rendering, one for each turn. Only an answer's
reasoning, with the marks around it and the white space behind it, is replaced. All other tokens stay as
they are: those that were generated may differ from the tokens of their text.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from kvrecall.domain.rewrites.rewrite import Edit
from workers.model.answer_format import Channels
from workers.model.tokenizer import ChatMessage, ChatTokenizer, Segment, keep_recent


def render_messages(
    tokenizer: ChatTokenizer,
    recent: Sequence[ChatMessage],
    messages: Sequence[ChatMessage],
    tools: list[Any],
    generate: bool,
    *,
    arguments: Mapping[str, Any],
    opening: str = "",
    keep_reasoning: bool = False,
) -> list[Segment]:
    """Render and encode messages as `ChatTokenizer.prompt` does, as the template says them all together.

    keep_reasoning: recorded answers stay as they were said. Raises BadMessages.
    """
    segments = tokenizer.prompt(
        recent, messages, tools, generate, arguments=arguments, opening=opening
    )
    if keep_reasoning:
        return segments
    return _restate_recorded(tokenizer, segments, recent, messages, tools, arguments)


def _restate_recorded(
    tokenizer: ChatTokenizer,
    segments: Sequence[Segment],
    recent: Sequence[ChatMessage],
    messages: Sequence[ChatMessage],
    tools: list[Any],
    arguments: Mapping[str, Any],
) -> list[Segment]:
    """Say recorded answers as the template does once the user's message behind them follows.

    segments: of `messages`, which follow `recent`. Raises BadMessages.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not tokenizer.rewrites or not answers or answers[0] > max(users, default=-1):
        return list(segments)
    tokens = [(token, segment.recorded) for segment in segments for token in segment.token_ids]
    recorded = [i for i, (_, is_recorded) in enumerate(tokens) if is_recorded]
    ends = [one + 1 for one, two in pairwise([*recorded, len(tokens) + 1]) if two > one + 1]
    for begin, user in reversed(list(pairwise([0, *(i for i in users if i)]))):
        said = [i for i in answers if begin <= i < user]
        if not said or len(ends) != len(answers):
            continue
        earlier, new = messages[begin : said[-1] + 1], messages[said[-1] + 1 : user + 1]
        leading = keep_recent([*recent, *messages[:begin]])
        pieces = tokenizer.restate(earlier, new, tools, leading=leading, arguments=arguments)
        stop = ends[answers.index(said[-1])]
        ids = [token for token, _ in tokens[:stop]]
        for edit in reversed(find_edits(tokenizer, ids, pieces)):
            tokens[edit.start : edit.stop] = [(token, True) for token in edit.token_ids]
    return [
        Segment(tuple(token for token, _ in run), is_recorded)
        for is_recorded, run in groupby(tokens, key=lambda each: each[1])
    ]


def find_edits(
    tokenizer: ChatTokenizer, token_ids: Sequence[int], pieces: Sequence[str]
) -> tuple[Edit, ...]:
    """Find the edits that make the end of a log say what `pieces` say (`ChatTokenizer.restate`).

    None where the log has other turns than the pieces.
    """
    turns = _split_turns(tokenizer, token_ids)
    channels = tokenizer.format.channels
    if channels is not None:
        return _drop_messages(tokenizer, token_ids, turns, pieces, channels)
    if tokenizer.format.reasoning is None or len(turns) < len(pieces):
        return ()
    opening, closing = tokenizer.format.reasoning
    found = (
        _restate_answer(tokenizer, token_ids[turn.start : turn.stop], piece, opening, closing)
        for turn, piece in zip(turns[-len(pieces) :], pieces, strict=True)
    )
    return tuple(
        Edit(turn.start + edit.start, turn.start + edit.stop, edit.token_ids)
        for turn, edit in zip(turns[-len(pieces) :], found, strict=True)
        if edit is not None
    )


def _split_turns(tokenizer: ChatTokenizer, token_ids: Sequence[int]) -> list[range]:
    """Split tokens behind each that ends a turn."""
    ends = tokenizer.turn_end_ids
    cuts = [0, *(at + 1 for at, token in enumerate(token_ids) if token in ends)]
    cuts += [len(token_ids)] if cuts[-1] < len(token_ids) else []
    return [range(start, stop) for start, stop in pairwise(cuts)]


def _drop_messages(
    tokenizer: ChatTokenizer,
    token_ids: Sequence[int],
    turns: Sequence[range],
    pieces: Sequence[str],
    channels: Channels,
) -> tuple[Edit, ...]:
    """Drop messages of reasoning that the pieces do not have: walks both from their ends."""
    opening = channels.reasoning[0]
    mark = tokenizer.encode(opening)
    edits = list[Edit]()
    left = list(pieces)
    for turn in reversed(turns):
        if not left:
            return tuple(reversed(edits))
        ids = token_ids[turn.start : turn.stop]
        if _find(ids, mark) is None:
            if opening in left.pop():
                return ()  # the template says a reasoning that the log does not have
        elif opening in left[-1] and _is_alike(tokenizer, ids, left[-1], opening):
            left.pop()
        else:
            edits.append(Edit(turn.start, turn.stop))
    return () if left else tuple(reversed(edits))


def _is_alike(tokenizer: ChatTokenizer, ids: Sequence[int], piece: str, opening: str) -> bool:
    texts = (tokenizer.decode(ids), tokenizer.drop_parting(piece))
    ours, theirs = (text.partition(opening)[2].split() for text in texts)
    return ours == theirs


def _restate_answer(
    tokenizer: ChatTokenizer, ids: Sequence[int], piece: str, opening: str, closing: str
) -> Edit | None:
    """Compare the reasoning of one turn; returns what the log says otherwise, if it does."""
    span = _find_reasoning(tokenizer, ids, piece, opening, closing)
    if span is None:
        return None
    said = tokenizer.drop_parting(piece)
    header = tokenizer.decode(ids[: span.start])
    if not said.startswith(header):
        return None
    block, body = _split_block(said[len(header) :], opening, closing)
    inner = tokenizer.decode(ids[span.start : span.stop])
    inner = inner.removeprefix(opening).removesuffix(closing)
    same = inner.split() == block.strip().removeprefix(opening).removesuffix(closing).split()
    if same and block.strip():
        return None
    stop, space = span.stop, body[: len(body) - len(body.lstrip())]
    while stop < len(ids) and not (text := tokenizer.decode([ids[stop]])).strip() and text:
        stop += 1
    rest = tokenizer.decode([ids[stop]]) if stop < len(ids) else ""
    if rest != rest.lstrip() and not rest.startswith(space or "\0"):
        space += rest.lstrip()
        stop += 1
    elif rest.startswith(space or "\0"):
        space = ""
    return Edit(span.start, stop, tuple(tokenizer.encode_rendered(block + space)))


def _find_reasoning(
    tokenizer: ChatTokenizer, ids: Sequence[int], piece: str, opening: str, closing: str
) -> range | None:
    """Find the tokens of the reasoning in a turn, with the marks around it; None without any."""
    first, last = tokenizer.encode(opening), tokenizer.encode(closing)
    start, end = _find(ids, first), _find(ids, last)
    if start is None:
        if end is None:
            return None
        start = _count_alike(tokenizer, ids, tokenizer.drop_parting(piece))
    if end is None:  # cut off within the reasoning: all up to the end of the turn
        return range(start, len(ids) - 1)
    return range(start, end + len(last)) if start <= end else None


def _count_alike(tokenizer: ChatTokenizer, ids: Sequence[int], said: str) -> int:
    """Count the first tokens whose text is that of `said`."""
    count = 0
    while count < len(ids) and said.startswith(tokenizer.decode(ids[: count + 1])):
        count += 1
    return count


def _split_block(text: str, opening: str, closing: str) -> tuple[str, str]:
    """Split a rendered answer into its reasoning, with the marks around it, and what follows."""
    begun = text.lstrip()
    if not begun.startswith((opening, closing)) or closing not in begun:
        return "", text
    end = text.index(closing) + len(closing)
    return text[:end], text[end:]


def _find(ids: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Find the first place of a run of tokens."""
    size = len(wanted)
    places = (at for at in range(len(ids) - size + 1) if list(ids[at : at + size]) == list(wanted))
    return next(places, None) if size else None
