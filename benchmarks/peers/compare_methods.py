"""kvpress beside `kvrecall eval methods`: the same cases and budgets, the same rows of results.

`python -m benchmarks.peers.compare_methods --model NAME --data LOCOMO --json FILE`. It makes an
environment of its own with kvpress, as `make_fixtures` does. A press compresses the whole context
once, after its prefill; ours evict block by block, and never hold more than budget and block.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import kvpress_python
from benchmarks.peers.make_fixtures import HERE, press
from evals import harness
from evals.configs import FULL, budget_rows, parse_config
from evals.languages.choice import get_language
from evals.suite import Record
from evals.suites.methods import suite as methods_suite
from evals.suites.methods.cases import Case
from evals.suites.methods.suite import ANSWER_TOKENS, BUDGETS, SIZE, MethodCase, load_case
from kvrecall.domain.settings.session import EpisodeSettings
from kvrecall_server.app.models import report_name, resolve_model
from kvrecall_server.reporting.results import build_results

SEED = 9000
# kvpress's presses with its own defaults.
PRESSES = {
    "kvpress snapkv": press("SnapKVPress"),
    "kvpress adakv": press("AdaKVPress", press=press("SnapKVPress")),
    "kvpress pyramidkv": press("PyramidKVPress"),
    "kvpress h2o": press("ObservedAttentionPress"),
    "kvpress tova": press("TOVAPress"),
    "kvpress streaming_llm": press("StreamingLLMPress"),
    "kvpress keydiff": press("KeyDiffPress"),
    "kvpress knorm": press("KnormPress"),
    "kvpress chunkkv": press("ChunkKVPress", press=press("SnapKVPress")),
    "kvpress kvzip": press("KVzipPress"),
    "kvpress expected attention": press("ExpectedAttentionPress"),
    "kvpress random": press("RandomPress"),
}


def main() -> None:
    """Run all presses on all cases that the journal lacks; write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="As for `kvrecall eval methods`.")
    parser.add_argument("--data", type=Path, action="append", default=[])
    parser.add_argument("--limit", type=int, default=12, help="Recordings per source.")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--environment", type=Path, default=HERE / ".venv")
    arguments = parser.parse_args()
    python = kvpress_python(arguments.environment)
    journal = arguments.json.with_suffix(".journal.jsonl")
    records = list[Record]()
    for unit in list_units(arguments.model, arguments.data, arguments.limit):
        answers = read_journal(journal).get(case_key(unit)) or run_presses(python, unit)
        append_journal(journal, case_key(unit), answers)
        records += to_records(unit, load_case(unit), answers)
    rows = methods_suite.result_rows(records, SEED)
    build_results("methods", SEED, report_name(arguments.model), rows).write(arguments.json)


def list_units(model: str, data: Sequence[Path], limit: int) -> list[MethodCase]:
    """The cases of `kvrecall eval methods` with the same options."""
    full = parse_config(FULL)
    setup = harness.Setup(model, full, "", SEED, 128, EpisodeSettings())
    return list(methods_suite.suite(setup, [full], BUDGETS, data, limit, SIZE).units)


def case_key(unit: MethodCase) -> str:
    """Key of a case in the journal: its recording, its seed and the model."""
    place = unit.place
    name = f"{place.source} {Path(place.path).name} {place.number}"
    return f"{name}, seed {unit.setup.seed}, {Path(unit.setup.model).name}"


def run_presses(python: Path, unit: MethodCase) -> list[dict[str, Any]]:
    """Records of the presses on one case, from a process of kvpress's environment."""
    case = load_case(unit)
    request = encode_case(unit.setup.model, case)
    length = len(request["context"])
    budgets = {budget: budget_rows(budget, length) for budget in BUDGETS}
    answer = subprocess.run(
        [str(python), str(HERE / "press_cases.py"), resolve_model(unit.setup.model)],
        input=json.dumps({"case": request, "presses": PRESSES, "budgets": budgets}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(answer.stdout)["records"]
    return found


def encode_case(model: str, case: Case) -> dict[str, Any]:
    """A case as token ids, rendered as in a session.

    `recorded` are the indices of the continuation's reply tokens.
    """
    loaded = harness.load(model)
    tokenizer = loaded.tokenizer
    context = [dict(message) for message in case.context]
    following = tokenizer.prompt(context, [dict(each) for each in case.continuation], [], False)
    recorded = [segment.recorded for segment in following for _ in segment.token_ids]
    return {
        "context": join(tokenizer.prompt([], context, [], False)),
        "questions": [
            join(tokenizer.prompt(context, [{"role": "user", "content": each.text}], [], True))
            for each in case.questions
        ],
        "continuation": join(following),
        "recorded": [index for index, each in enumerate(recorded) if each],
        "ends": sorted(loaded.model.eos_token_ids),
        "max_tokens": ANSWER_TOKENS,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
    }


def join(segments: Sequence[Any]) -> list[int]:
    """Token ids of segments."""
    return [token for segment in segments for token in segment.token_ids]


def to_records(
    unit: MethodCase, case: Case, answers: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Records in the form of `kvrecall eval methods`. A press's peak is the whole context."""
    language = get_language(unit.setup.model)
    tokenizer = harness.load(unit.setup.model).tokenizer
    for each in answers:
        common = {
            "data": unit.place.source,
            **{name: each[name] for name in ("arm", "budget", "rows", "length", "active_rows")},
            "peak_rows": each["length"],
        }
        for question, reply in zip(case.questions, each["replies"], strict=True):
            text = tokenizer.decode(reply)
            right = float(language.is_answer(text, question.answer))
            facts = len(case.questions)
            yield {"kind": "question", **common, "facts": facts, "reply": text, "right": right}
        distance = {name: each[name] for name in ("heard", "kl", "top1")}
        yield {"kind": "fidelity", **common, **distance}


def read_journal(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Records of the cases that have run, by their keys."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {entry["case"]: entry["records"] for entry in map(json.loads, lines)}


def append_journal(path: Path, key: str, records: Sequence[dict[str, Any]]) -> None:
    """Append a case's records unless they are there."""
    if key in read_journal(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"case": key, "records": list(records)}) + "\n")


if __name__ == "__main__":
    main()
