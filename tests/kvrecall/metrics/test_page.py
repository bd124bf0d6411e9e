"""A page of metrics: families from a catalogue, gauges of the moment, forms by what is accepted."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvrecall.metrics.family import Family, counter, gauge, histogram
from kvrecall.metrics.page import Metrics, MetricsPage

CATALOGUE: tuple[Family, ...] = (
    counter("made_total", "Things made.", kind=("red", "blue"), size=("s", "l")),
    counter("seen_total", "Things seen.", what=()),
    counter("plain_total", "Things."),
    gauge("limit_bytes", "A limit.", tier=()),
    histogram("wait_seconds", "A wait.", (0.1, 1.0)),
)


def read(page: MetricsPage) -> dict[tuple[str, ...], float]:
    content_type, text = page.render("")
    assert content_type.startswith("text/plain")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in parse_text(text.decode())
        for sample in family.samples
    }


def test_series_with_known_labels_are_there_before_they_are_counted() -> None:
    samples = read(MetricsPage("test", "1", (Metrics(CATALOGUE),)))
    for kind in ("red", "blue"):
        for size in ("s", "l"):
            assert samples["kvrecall_made_total", kind, size] == 0
    assert samples["kvrecall_plain_total",] == 0
    assert not any(name == "kvrecall_seen_total" for name, *_ in samples)


def test_constant_labels_are_on_every_series() -> None:
    metrics = Metrics(CATALOGUE, worker="a")
    metrics.inc("plain_total", 2)
    metrics.inc("seen_total", what="x")
    metrics.observe("wait_seconds", 0.5)
    for family in metrics.collect():
        assert all(sample.labels["worker"] == "a" for sample in family.samples)


def test_a_limit_that_is_no_longer_set_is_absent() -> None:
    metrics = Metrics(CATALOGUE)
    page = MetricsPage("test", "1", (metrics,))
    metrics.set("limit_bytes", 7, tier="nvme")
    metrics.set("limit_bytes", 9, tier="ram")
    assert read(page)["kvrecall_limit_bytes", "nvme"] == 7
    metrics.set("limit_bytes", None, tier="nvme")
    metrics.set("limit_bytes", None, tier="never there")
    samples = read(page)
    assert ("kvrecall_limit_bytes", "nvme") not in samples
    assert samples["kvrecall_limit_bytes", "ram"] == 9


def test_a_counter_that_is_kept_elsewhere_advances_to_its_total() -> None:
    metrics = Metrics(CATALOGUE)
    page = MetricsPage("test", "1", (metrics,))
    for total in (3, 3, 10):
        metrics.advance("seen_total", total, what="x")
        assert read(page)["kvrecall_seen_total", "x"] == total


def test_gauges_are_refreshed_at_each_reading() -> None:
    metrics = Metrics(CATALOGUE)
    page = MetricsPage("test", "1", (metrics,))
    values = iter((1.0, 2.0))
    metrics.refresh_with(lambda: metrics.set("limit_bytes", next(values), tier="ram"))
    assert [read(page)["kvrecall_limit_bytes", "ram"] for _ in range(2)] == [1.0, 2.0]


def test_a_page_shows_the_process_and_all_its_parts_once() -> None:
    parts = (
        Metrics(CATALOGUE[:2]),
        Metrics((gauge("other", "Another part."),)),
    )
    page = MetricsPage("serve", "1.2", parts)
    names = [family.name for family in page.collect()]
    assert len(set(names)) == len(names)
    assert {"kvrecall_build_info", "process_cpu_seconds", "python_gc_collections"} <= set(names)
    assert read(page)["kvrecall_build_info", "serve", "1.2"] == 1


def test_openmetrics_has_exemplars_and_no_series_of_creation_times() -> None:
    metrics = Metrics(CATALOGUE)
    metrics.observe("wait_seconds", 0.5, "4bf92f")
    metrics.observe("wait_seconds", 0.05)
    accept = "application/openmetrics-text; version=1.0.0"
    content_type, text = MetricsPage("test", "1", (metrics,)).render(accept)
    assert content_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in parse_openmetrics(text.decode())}
    exemplars = [
        sample.exemplar.labels
        for sample in families["kvrecall_wait_seconds"].samples
        if sample.exemplar is not None
    ]
    assert exemplars == [{"trace_id": "4bf92f"}]
    assert "_created" not in text.decode()


@pytest.mark.parametrize(
    ("name", "labels"),
    [("unknown_total", {}), ("seen_total", {"color": "red"}), ("seen_total", {})],
)
def test_an_unknown_family_or_label_is_an_error(name: str, labels: dict[str, str]) -> None:
    with pytest.raises((KeyError, ValueError)):
        Metrics(CATALOGUE).inc(name, **labels)
