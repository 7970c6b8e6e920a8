"""What a monitoring system is told of queries, and how it asks."""

from __future__ import annotations

import http.client

from penstock.pipeline.run import Metrics, MetricsServer, Progress

QUERY = Progress(
    "p-out",
    "running",
    batches=3,
    batch=7,
    rows=1_500,
    rows_per_second=250.5,
    batch_seconds=0.25,
    lag={'fmq:/a "b"\\c': 12},
    lost={"log:/x": 3},
    lost_unknown=1,
    skipped={"decoded": 4},
    restarts=2,
)


def test_all_that_is_known_of_a_query_is_in_the_text() -> None:
    metrics = Metrics()
    metrics.take(Progress("p-out", "starting"))
    metrics.take(QUERY)
    metrics.take(Progress("q", "waiting"))
    lines = metrics.text().splitlines()
    for expected in (
        "# TYPE penstock_query_rows_total counter",
        'penstock_query_rows_total{query="p-out"} 1500',
        'penstock_query_rows_total{query="q"} 0',
        'penstock_query_batches_total{query="p-out"} 3',
        'penstock_query_batch_seconds{query="p-out"} 0.25',
        'penstock_query_rows_per_second{query="p-out"} 250.5',
        'penstock_query_lag_messages{query="p-out",url="fmq:/a \\"b\\"\\\\c"} 12',
        'penstock_query_lost_messages_total{query="p-out",url="log:/x"} 3',
        'penstock_query_lost_unknown_total{query="p-out"} 1',
        'penstock_query_skipped_messages_total{query="p-out",node="decoded"} 4',
        'penstock_query_restarts_total{query="p-out"} 2',
        'penstock_query_state{query="p-out",state="running"} 1',
        'penstock_query_state{query="p-out",state="starting"} 0',
    ):
        assert expected in lines
    # Each family once, with its help and its type before its values.
    helps = [line.split()[2] for line in lines if line.startswith("# HELP")]
    assert len(helps) == len(set(helps))
    seen = [line.partition("{")[0] for line in lines if line[0] != "#"]
    assert list(dict.fromkeys(seen)) == helps


def test_it_is_asked_by_http_again_and_again_on_one_connection() -> None:
    metrics = Metrics()
    metrics.take(QUERY)
    with MetricsServer(metrics) as server:
        assert server.address == f"http://127.0.0.1:{server.port}/metrics"
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        for _ in range(3):
            client.request("GET", "/metrics")
            answer = client.getresponse()
            assert answer.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
            assert b'rows_total{query="p-out"} 1500\n' in answer.read()
        for method, path, status in (
            ("HEAD", "/metrics", 200),
            ("GET", "/", 404),
            ("POST", "/metrics", 405),
        ):
            client.request(method, path)
            answer = client.getresponse()
            assert answer.status == status
            answer.read()
        client.close()
