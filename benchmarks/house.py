"""Measures of the source tree: rooms, floors, repeated types, hops of a turn, and the words in use.

`python -m benchmarks.house` reads the source of its own checkout; `--root DIR --label 0.1.0` reads
another one, which need not be installed. No module of the measured tree is imported. The rows of
all labels go to one result file under `benchmarks/results/`: rows of a label that is measured again
are replaced, the others are kept.

Every measure leaves out generated stubs (`*_pb2*.py`) and tests, except the number of long test
files.
"""

import argparse
import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.house_source import (
    SourceTree,
    docstrings,
    identifiers,
    is_alias,
    longest_chain,
    prose_lines,
    split_name,
)
from kvrecall.reporting.results import Row, build_results, read_results

HERE = Path(__file__).resolve().parents[1]
RESULT_FILE = Path(__file__).resolve().parent / "results" / "house.json"
LONG_FILE = 400  # lines

# The declared order of the rooms, top first. The longest prefix of a module's name decides on its
# floor; an import of a higher floor is an arrow up. Rooms on one floor may import each other, but
# not in a circle.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("benchmarks",),
    ("kvrecall.cli",),
    ("evals", "kvrecall.demo", "kvrecall.replay", "kvrecall.admin"),
    ("kvrecall.reporting",),
    ("kvrecall.app", "kvrecall.testing"),
    ("gateway", "workers.rpc"),
    ("services", "workers.scheduler"),
    ("workers.tasks",),
    ("workers.repair", "workers.episodes"),
    ("workers.engine", "workers.generation"),
    ("workers",),
    ("workers.methods",),
    ("workers.model",),
    ("workers.primitives",),
    ("workers.cache",),
    ("workers.errors",),
    ("kvstore",),
    ("kvstore.sessions",),
    ("kvstore.hierarchy",),
    ("kvstore.tiers",),
    ("kvstore.format",),
    ("kvstore.errors",),
    ("reference",),
    ("kvrecall.client",),
    ("kvrecall.protocol",),
    ("kvrecall.domain",),
    ("kvrecall.protocol.v1", "kvrecall.v1"),
)
# Rooms that meet at the wire only: an import between them, in either direction, is an arrow up.
APART = (({"gateway", "services"}, {"workers", "kvstore"}),)

# Names of the types that declare one value, in Python and in the .proto, in 0.1.0 and since.
VALUES: Mapping[str, str] = {
    "chat message": r"(Chat|Assistant)?Message(Body|View)?",
    "sampling": r"\w*Sampling(?!Error)\w*",
    "session settings": r"CreateSession(Body)?|NewSession|Session(Settings|Spec|View|Config)"
    r"|WorkerSession",
    "memory report": r"\w*Memory(Report|View)\w*",
    "repair": r"\w*Repair\w*(Report|Result|Details|Record|Commit|View|Entry|Summary|Outcome)"
    r"|(Due|Told)?Repair",
    "shared pages": r"\w*SharedPages\w*",
}
OPTION = "repair_seconds"
# Other values of the same name: a deadline of worker calls, and totals in reports and suites.
OPTION_ELSEWHERE = re.compile(r"cluster/|wire_settings|grpc_worker|replay|evals/|benchmarks/")

# The way of a turn from the HTTP API to the scheduler: one group of files per station.
TURN_PATH: Mapping[str, tuple[str, ...]] = {
    "service": ("services/turns.py", "services/turn_*.py"),
    "worker pool": ("services/fleet.py", "services/cluster/pool.py"),
    "gRPC client": ("services/grpc_worker.py", "services/cluster/grpc_*.py"),
    "worker": ("workers/calls.py", "workers/rpc/*.py"),
}

WH_WORDS = "what which who whoever whose whether how where when why that"
# Everyday verbs that carried several technical meanings each, and pronouns where a role has a name.
OVERLOADED = frozenset(
    re.findall(
        r"\w+",
        """
        told tell tells untold said say says heard settle settled settles owed owe owes resting
        whoever nobody somebody doubt doubts doubtful worth leftover leftovers hurry hurried seat
        seated unseat remember remembered recall retelling place places
        """,
    )
)


@dataclass(frozen=True)
class Measure:
    """One number of a tree. `detail` names what was counted, as far as that is short."""

    metric: str
    unit: str
    value: float
    detail: str = ""


def measure(root: Path) -> list[Measure]:
    """Every measure of the tree under `root`."""
    tree = SourceTree(root)
    return [
        *measure_sizes(tree),
        *measure_imports(tree),
        *measure_values(tree),
        measure_option(tree),
        *measure_hops(tree),
        *measure_docstrings(tree),
        *measure_words(tree),
    ]


def measure_sizes(tree: SourceTree) -> list[Measure]:
    """The biggest folder and the files over 400 lines."""
    folders = Counter(m.path.parent for m in tree.modules.values() if m.path.name != "__init__.py")
    folder, modules = folders.most_common(1)[0]
    long = [
        m.path.as_posix() for m in tree.modules.values() if count_lines(m.path, tree) > LONG_FILE
    ]
    tests = [p.relative_to(tree.root) for p in sorted((tree.root / "tests").rglob("*.py"))]
    long_tests = [path.as_posix() for path in tests if count_lines(path, tree) > LONG_FILE]
    return [
        Measure("modules in the biggest folder", "modules", modules, folder.as_posix()),
        Measure("files over 400 lines", "files", len(long), ", ".join(long)),
        Measure("test files over 400 lines", "files", len(long_tests), ", ".join(long_tests)),
    ]


def count_lines(path: Path, tree: SourceTree) -> int:
    """Lines of a file of the tree."""
    return len((tree.root / path).read_text(encoding="utf-8").splitlines())


def measure_imports(tree: SourceTree) -> list[Measure]:
    """Imports against the declared order of rooms, and rooms that import each other in a circle."""
    up = sorted({f"{m.name} > {target}" for m, target in tree.imports() if is_up(m.name, target)})
    graph: dict[str, set[str]] = defaultdict(set)
    for module, target in tree.imports():
        room = tree.modules[target].room
        # An `__init__` that gathers the names of its own modules makes no circle.
        if not (room + ".").startswith(module.room + ".") or room == module.room:
            graph[module.room].add(room)
    circles = [circle for circle in find_circles(graph) if not one_family(circle)]
    named = "; ".join(" - ".join(circle) for circle in circles)
    return [
        Measure("arrows up", "imports", len(up), "; ".join(up[:8])),
        Measure("rooms in circles", "rooms", sum(map(len, circles)), named),
    ]


def is_up(module: str, target: str) -> bool:
    """True for an import of a higher floor, or between rooms that meet at the wire only."""
    top, below = module.partition(".")[0], target.partition(".")[0]
    if any({top, below} & a and {top, below} & b for a, b in APART):
        return True
    return get_floor(target) < get_floor(module)


def get_floor(module: str) -> int:
    """The floor of a module, 0 is the top; modules of no floor stand above all."""
    found = [
        (len(prefix), floor)
        for floor, prefixes in enumerate(FLOORS)
        for prefix in prefixes
        if f"{module}.".startswith(f"{prefix}.")
    ]
    return max(found)[1] if found else -1


def one_family(circle: list[str]) -> bool:
    """True for a room and rooms inside it: a package that imports its own sub-packages."""
    shortest = min(circle, key=len)
    return all(f"{room}.".startswith(f"{shortest}.") for room in circle)


def find_circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of two rooms or more."""
    rooms = sorted({*graph, *(each for targets in graph.values() for each in targets)})
    reach = {room: reachable(graph, room) for room in rooms}
    together = {
        tuple(o for o in rooms if o == r or (o in reach[r] and r in reach[o])) for r in rooms
    }
    return [list(circle) for circle in sorted(together) if len(circle) > 1]


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """All rooms that imports lead to from one room."""
    seen: set[str] = set()
    open_rooms = [start]
    while open_rooms:
        for room in graph.get(open_rooms.pop(), set()) - seen:
            seen.add(room)
            open_rooms.append(room)
    return seen


def measure_values(tree: SourceTree) -> list[Measure]:
    """Number of types that declare the same value: in service and workers, and in the client."""
    service = [*declared_types(tree, in_client=False)]
    client = [*declared_types(tree, in_client=True)]
    measures = []
    for value, pattern in VALUES.items():
        names = [f"{where}:{name}" for where, name in service if re.fullmatch(pattern, name)]
        measures.append(Measure(f"types per {value}", "types", len(names), ", ".join(names)))
    pattern = "|".join(VALUES.values())
    names = [name for _, name in client if re.fullmatch(pattern, name)]
    measures.append(
        Measure("types of these values in the client", "types", len(names), ", ".join(names))
    )
    return measures


def declared_types(tree: SourceTree, in_client: bool) -> Iterator[tuple[str, str]]:
    """Classes, type aliases and proto messages: the file's name, the type's name.

    The client counts apart: it is installed without the service, so it has to declare its values.
    """
    for module in tree.modules.values():
        if (".client" in module.name) is not in_client:
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                yield module.path.as_posix(), node.name
        for statement in module.tree.body:
            if is_alias(statement):
                yield module.path.as_posix(), ast.unparse(statement).partition(" ")[0]
    if not in_client:
        for path in sorted((tree.root / "proto").rglob("*.proto")):
            names = re.findall(r"^message (\w+)", path.read_text(encoding="utf-8"), re.M)
            yield from ((path.name, name) for name in names)


def measure_option(tree: SourceTree) -> Measure:
    """Source files that name one session option, except those with another value of that name."""
    texts = {m.path.as_posix(): m.text for m in tree.modules.values()}
    for path in sorted((tree.root / "proto").rglob("*.proto")):
        texts[path.relative_to(tree.root).as_posix()] = path.read_text(encoding="utf-8")
    files = [
        path
        for path, text in texts.items()
        if re.search(rf"\b{OPTION}\b", text) and not OPTION_ELSEWHERE.search(path)
    ]
    return Measure(f"source files of the option {OPTION}", "files", len(files), ", ".join(files))


def measure_hops(tree: SourceTree) -> list[Measure]:
    """Nested async generators that each event of a turn passes: in the service, and in total."""
    hops = {
        group: max((longest_chain(module.tree) for module in tree.matching(patterns)), default=0)
        for group, patterns in TURN_PATH.items()
    }
    detail = ", ".join(f"{group} {count}" for group, count in hops.items())
    return [
        Measure("nested async generators in the service's turn", "generators", hops["service"]),
        Measure("async generators of a turn", "generators", sum(hops.values()), detail),
    ]


def measure_docstrings(tree: SourceTree) -> list[Measure]:
    """Number of docstrings, and the share that begins with a wh-word."""
    first_lines = [doc.strip().splitlines()[0] for doc in docstrings(tree) if doc.strip()]
    words = [re.split(r"[^A-Za-z]", line, maxsplit=1)[0].lower() for line in first_lines]
    clauses = sum(word in WH_WORDS.split() for word in words)
    return [
        Measure("docstrings", "docstrings", len(words)),
        Measure("docstrings that are wh-clauses", "%", round(100 * clauses / len(words), 2)),
    ]


def measure_words(tree: SourceTree) -> list[Measure]:
    """Overloaded words: identifiers (distinct per file) and lines of prose that contain one."""
    in_names: Counter[str] = Counter()
    in_prose: Counter[str] = Counter()
    functions_of = 0
    for module in tree.modules.values():
        names = set(identifiers(module.tree))
        in_names.update(word for name in names for word in set(split_name(name)) & OVERLOADED)
        functions_of += sum(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (node.name == "of" or node.name.endswith("_of"))
            for node in ast.walk(module.tree)
        )
        for line in prose_lines(module):
            in_prose.update(set(re.findall(r"[a-z]+", line.lower())) & OVERLOADED)
    return [
        to_measure("identifiers with an overloaded word", "identifiers", in_names),
        to_measure("lines of prose with an overloaded word", "lines", in_prose),
        Measure("functions named X_of", "functions", functions_of),
    ]


def to_measure(metric: str, unit: str, counts: Counter[str]) -> Measure:
    """The sum of the counts, with the most frequent words as the detail."""
    words = ", ".join(f"{word} {count}" for word, count in counts.most_common(8))
    return Measure(metric, unit, counts.total(), words)


def to_rows(label: str, measures: Iterable[Measure]) -> list[Row]:
    """Rows of the result file."""
    return [
        {
            "condition": label,
            "metric": each.metric,
            "unit": each.unit,
            "median": each.value,
            "p95": each.value,
            "n": 1,
            **({"detail": each.detail} if each.detail else {}),
        }
        for each in measures
    ]


def merge_rows(path: Path, label: str, rows: list[Row]) -> list[Row]:
    """The rows of other labels that the file has, then `rows`; sorted by label."""
    kept = [row for row in read_results(path).results if row["condition"] != label]
    return sorted([*kept, *rows], key=lambda row: str(row["condition"]))


def to_table(rows: Iterable[Row]) -> str:
    """A Markdown table: a line per measure, a column per label."""
    by_metric: dict[str, dict[str, str]] = defaultdict(dict)
    for row in rows:
        shown = f"{row['median']:g}{' %' if row['unit'] == '%' else ''}"
        by_metric[str(row["metric"])][str(row["condition"])] = shown
    labels = sorted({label for values in by_metric.values() for label in values})
    lines = [f"| measure | {' | '.join(labels)} |", f"| --- |{' ---: |' * len(labels)}"]
    lines += [
        f"| {metric} | {' | '.join(values.get(label, '') for label in labels)} |"
        for metric, values in by_metric.items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure one tree, print both, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=HERE, help="checkout to measure")
    parser.add_argument("--label", default="0.2.0", help="the version that the checkout has")
    parser.add_argument("--out", type=Path, default=RESULT_FILE)
    given = parser.parse_args()
    rows = to_rows(given.label, measure(given.root))
    merged = merge_rows(given.out, given.label, rows) if given.out.exists() else rows
    print(to_table(merged))
    build_results("house", 0, "no model", merged).write(given.out)


if __name__ == "__main__":
    main()
