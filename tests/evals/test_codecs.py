"""Raw and int8 rows compared: rows read back from the store, accuracy, bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from evals import harness
from evals.codecs import INT8, RAW, page_shares, parse_codecs
from evals.conditions import BASE, FULL, MATCHED, SPREAD
from evals.configs import parse_configs
from evals.errors import BadCodec
from evals.harness import Session, Setup
from evals.reporting.eval_plots import build_figure
from evals.reporting.eval_tables import build_tables
from evals.suite import Record
from evals.suites.longconv import suite as longconv
from evals.suites.longconv.conversations import generate_topics
from evals.suites.longconv.suite import LongConv
from evals.suites.mq_niah import variants as mq_niah_suites
from evals.suites.mq_niah.case import Protocol
from evals.suites.mq_niah.rows import result_rows
from evals.suites.mq_niah.suite import CODEC_CONDITIONS, Frontier, run
from kvrecall_server.reporting.figures import svg
from kvrecall_server.reporting.results import Results
from kvstore.format.codec import Codec
from kvstore.format.page import PageLayout, parse_header
from kvstore.tiers.nvme.tier import NvmeTier
from reference import MODEL_PATH

MakeSetup = Callable[..., Setup]
QUESTIONS = 4


def small(setup: Setup) -> LongConv:
    return LongConv(setup, tokens=400, topics=2, questions=QUESTIONS)


def ask_all(session: Session) -> list[list[int]]:
    """Token ids of the answers to all questions."""
    questions = generate_topics(5, 400, 2, QUESTIONS).questions
    return [list(session.ask(question.messages(), 24).token_ids) for question in questions]


@pytest.mark.parametrize("config", ["keydiff", "h2o", "epicache"])
def test_reading_raw_rows_back_before_every_turn_changes_no_token(
    make_setup: MakeSetup, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = generate_topics(5, 400, 2, QUESTIONS).messages()
    with harness.open_session(make_setup(config, "96"), history) as session:
        answers = ask_all(session)
        selection = session.state.selection
    monkeypatch.setattr(Session, "__init__", _always_reload(Session.__init__))
    with harness.open_session(make_setup(config, "96"), history) as reloaded:
        assert reloaded.reload_every_turn
        assert reloaded.state.selection == selection
        assert ask_all(reloaded) == answers


def _always_reload(plain: Callable[..., None]) -> Callable[..., None]:
    def make(self: Session, *parts: Any, reload_every_turn: bool) -> None:
        plain(self, *parts, reload_every_turn=True)

    return make


def test_active_rows_of_a_session_with_int8_pages_were_decoded_from_them(
    make_setup: MakeSetup,
) -> None:
    conversation = generate_topics(5, 400, 2, QUESTIONS)
    first_keys = {}
    for codec in (RAW, INT8):
        with harness.open_session(
            replace(make_setup("full", "1/1"), codec=codec), conversation.messages()
        ) as session:
            session.ask(conversation.questions[0].messages(), 1)
            engine = session.scheduler.engine
            slot = engine.sessions["asked"].slot
            assert slot is not None
            active = engine.cache.read(slot, 0).keys[:, :64]
            assert torch.equal(active, engine.store.gather("asked", torch.arange(64))[0, 0])
            first_keys[codec] = active.clone()
    assert not torch.equal(first_keys[RAW], first_keys[INT8])
    assert torch.allclose(
        first_keys[RAW], first_keys[INT8], atol=0.02 * float(first_keys[RAW].abs().max())
    )


def test_all_pages_of_an_int8_store_are_int8(
    make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    put = NvmeTier.put

    def noting(self: NvmeTier, pages: Any, **options: Any) -> None:
        written.extend(parse_header(blob).codec for _, blob in pages)
        put(self, pages, **options)

    monkeypatch.setattr(NvmeTier, "put", noting)
    longconv.run(small(replace(make_setup("snapkv", "1/4"), codec=INT8)))
    assert set(written) == {Codec.INT8}


def test_longconv_compares_the_same_questions_and_reports_the_bytes_of_int8(
    make_setup: MakeSetup,
) -> None:
    suite = longconv.suite(
        small(make_setup("full")), parse_configs(["keydiff"]), ["1/4"], 1, (RAW, INT8)
    )
    assert len(suite.units) == 2 * 2
    rows = suite.rows([record for unit in suite.units for record in longconv.run(unit)])
    cost = {row["method"]: row for row in rows if row.get("measure") == "int8 minus raw"}
    assert set(cost) == {"full", "keydiff"}
    assert all(row["n"] == QUESTIONS and abs(row["mean"]) <= 1 for row in cost.values())
    assert {row["method"] for row in rows if row["condition"] == "all facts"} == {
        "full",
        "keydiff",
        "full, int8",
        "keydiff, int8",
    }
    stored = {
        row["condition"]: row
        for row in rows
        if row.get("metric") == "bytes of a token's stored rows"
    }
    assert stored[INT8]["ratio"] < 0.4  # float32 rows, and an unfinished page
    assert draw_svg("longconv", rows).startswith("<svg")


def test_one_codec_alone_has_no_comparison(make_setup: MakeSetup) -> None:
    suite = longconv.suite(
        small(make_setup("full")), parse_configs(["keydiff"]), ["1/4"], 1, (INT8,)
    )
    rows = suite.rows([record for unit in suite.units for record in longconv.run(unit)])
    assert not [row for row in rows if row.get("measure") == "int8 minus raw"]
    assert not [row for row in rows if "bytes" in str(row.get("metric"))]


def test_mq_niah_compares_each_condition_with_itself() -> None:
    records = list[Record]()
    for codec in (RAW, INT8):
        protocol = Protocol(str(MODEL_PATH), 4, "1/6", 700, 2, codec=codec)
        records += run(Frontier(protocol, 5, "14→23", (16,), (FULL, BASE, MATCHED, SPREAD)))
    rows = result_rows(records, 5)
    cost = {row["of"]: row for row in rows if row.get("measure") == "int8 minus raw"}
    assert set(cost) == {FULL, BASE, MATCHED, SPREAD}
    gains = [row["of"] for row in rows if row.get("against") == MATCHED]
    assert gains == [SPREAD, f"{SPREAD}, int8"]
    rows_held = {
        record["active_rows"] for record in records if record.get("condition") in (MATCHED, SPREAD)
    }
    assert len(rows_held) == 1
    assert draw_svg("mq-niah", rows).startswith("<svg")


def draw_svg(suite: str, rows: Any) -> str:
    """The suite's figure as SVG; its tables are built as well."""
    results = Results(suite, "", 5, {}, {}, "model", rows)
    assert build_tables(results)
    figure = build_figure(results)
    assert figure is not None
    return svg(figure)


def test_a_suite_of_two_codecs_has_the_conditions_of_a_codec_comparison() -> None:
    chosen = mq_niah_suites.SuiteRequest(("4q",), (8,), 7, 2, (RAW, INT8))
    units = mq_niah_suites.build_suite(Protocol("none", 0, "", 0), chosen).units
    assert [(unit.protocol.codec, unit.conditions) for unit in units] == 2 * [
        (RAW, CODEC_CONDITIONS),
        (INT8, CODEC_CONDITIONS),
    ]
    assert [unit.partition for unit in units[::2]] == [unit.partition for unit in units[1::2]]


def test_unknown_codecs_and_suites_that_take_one_codec_are_refused() -> None:
    assert parse_codecs([]) == (RAW,)
    assert parse_codecs(["int8", "raw", "int8"]) == (INT8, RAW)
    with pytest.raises(BadCodec, match="int4"):
        parse_codecs(["int4"])
    with pytest.raises(BadCodec, match="takes one codec"):
        mq_niah_suites.build_suite(
            Protocol("none", 0, "", 0),
            mq_niah_suites.SuiteRequest(("revisit",), (), 7, 2, (RAW, INT8)),
        )


def test_bytes_of_int8_pages_by_dtype() -> None:
    model = harness.load(str(MODEL_PATH)).model
    sizes = (model.shape.n_layers, model.shape.n_kv_heads, model.shape.head_dim)
    shares = page_shares(PageLayout(*sizes, dtype=model.dtype, fingerprint="a"))
    assert 0.25 < shares["float32"] < 0.3
    assert 0.5 < shares["bfloat16"] <= 0.55
