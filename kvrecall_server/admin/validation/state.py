"""The check of a worker's state: decoded without torch, as nothing here computes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.admin.validation.bounds import Bounds

# Padding of positions, where a head has fewer rows than another.
_EMPTY = (1 << 31) - 1
_TENSORS = frozenset({"positions", "promoted", "accumulated"})


def parse_state(data: bytes) -> pb.SessionState | None:
    """Return a decoded state, None if it cannot be decoded."""
    try:
        return pb.SessionState.FromString(data)
    except DecodeError:
        return None


def check_state(state: pb.SessionState, logged: int, bounds: Bounds) -> Iterator[str]:
    """Yield what is wrong in a state of a session whose turn log has `logged` tokens."""
    expected = state.length + len(state.pending)
    if expected != logged:
        yield f"its turn log has {logged} tokens, its state {expected}"
        return  # everything else is measured by the log
    if state.unsettled > len(state.pending):
        yield f"its state has {state.unsettled} unsettled tokens of {len(state.pending)} pending ones"
    for name in ("pending", "deferred_signal", "patched_prompt"):
        yield from check_tokens(getattr(state, name), bounds, f"its state ({name})")
    if state.promoted_rows > state.length or len(state.deferred_signal) > logged:
        yield "its state has more promoted or deferred tokens than its turn log has tokens"
    if len(state.layer_rows) not in (0, bounds.n_layers or len(state.layer_rows)):
        yield f"its state splits the budget over {len(state.layer_rows)} layers, not {bounds.n_layers}"
    yield from check_spans(state.segments, logged, "its state")
    states = list(state.snapshots)
    if states != sorted(set(states)) or (
        states and not 0 < states[0] <= states[-1] <= state.length
    ):
        yield f"its state has recurrent states after {states[:4]} ... rows, and {state.length} rows"
    yield from _check_selection(state, bounds)
    if state.eviction_scores:
        yield from _check_scores(state)


def check_tokens(token_ids: Iterable[int], bounds: Bounds, where: str) -> Iterator[str]:
    """Yield the first token that no model of these bounds knows."""
    highest = max(token_ids, default=0)
    if highest >= bounds.vocabulary:
        yield f"{where} has token {highest}, and the vocabulary ends before {bounds.vocabulary}"


def check_spans(spans: Iterable[pb.Span], tokens: int, where: str) -> Iterator[str]:
    """Yield the first segment that is no part of so many tokens."""
    for span in spans:
        if not span.start < span.stop <= tokens:
            yield f"{where} has a segment of tokens {span.start} to {span.stop}, of {tokens} in all"
            return


def check_rows(data: bytes, tokens: int, where: str) -> Iterator[str]:
    """Yield what is wrong in the rows of an episode, of so many tokens."""
    tensors = _load(data) if data else {}
    if tensors is None:
        yield f"{where} has rows that cannot be decoded"
        return
    for tensor in tensors.values():
        if tensor.dtype.kind in "iu" and not _are_within(tensor, tokens):
            yield f"{where} has rows of tokens beyond its {tokens}"
            return


def _check_selection(state: pb.SessionState, bounds: Bounds) -> Iterator[str]:
    if not state.selection:
        if state.length:
            yield f"its state has {state.length} rows and selects none of them"
        return
    tensors = _load(state.selection)
    if tensors is None:
        yield "its state has a selection of rows that cannot be decoded"
        return
    layers = [name for name in tensors if name.startswith("positions.")]
    count = len(layers)
    names = {f"{kind}.{layer}" for kind in _TENSORS for layer in range(count)}
    required = {name for name in names if not name.startswith("accumulated.")}
    if count not in (bounds.n_layers or count, 0) or not required <= tensors.keys() <= names:
        yield f"its state selects rows of {count} layers, and the model has {bounds.n_layers}"
        return
    for layer in range(count):
        yield from _check_layer(tensors, layer, state.length, bounds)


def _check_layer(
    tensors: Mapping[str, Any], layer: int, length: int, bounds: Bounds
) -> Iterator[str]:
    positions = tensors[f"positions.{layer}"]
    heads = positions.shape[0] if positions.ndim == 2 else 0
    if positions.dtype != "int32" or heads != (bounds.n_kv_heads or heads) or not heads:
        yield f"its state selects rows of layer {layer} in another shape than the model's"
        return
    for kind, dtype in (("promoted", "bool"), ("accumulated", "float32")):
        beside = tensors.get(f"{kind}.{layer}")
        if beside is not None and (beside.shape != positions.shape or beside.dtype != dtype):
            yield f"its state has other rows in layer {layer} than it selects"
    if positions.shape[1] > length or not _are_within(positions, length):
        yield f"its state selects rows beyond the {length} of the session in layer {layer}"


def _check_scores(state: pb.SessionState) -> Iterator[str]:
    tensors = _load(state.eviction_scores)
    if tensors is None or tensors.keys() != {"tokens", "scores"}:
        yield "its state has scores of evictions that cannot be decoded"
        return
    tokens, scores = tensors["tokens"], tensors["scores"]
    if tokens.ndim != 1 or tokens.dtype != "int32" or scores.shape != tokens.shape:
        yield "its state has scores of evictions in another form than a worker writes"
    elif not _are_within(tokens, state.length):
        yield f"its state has scores of tokens beyond the {state.length} of the session"


def _load(data: bytes) -> Mapping[str, Any] | None:
    """Return the arrays of a safetensors value; None if it is none, or has a type of torch alone."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(data)
    except (SafetensorError, KeyError, TypeError, ValueError):
        return None


def _are_within(positions: Any, tokens: int) -> bool:
    return bool(((positions >= 0) & ((positions < tokens) | (positions == _EMPTY))).all())
