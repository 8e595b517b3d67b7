"""The gateway's benchmark: its compiled parts, what it computes, and a short run of the whole; and the simulation of
what gateways know of prefix caches."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import orjson
import pytest

from loadtest.gateway import against, contenders, prefix_knowledge
from loadtest.gateway.bench import DIRECT, run
from loadtest.gateway.cancel import STATES, disconnect_ms, observing
from loadtest.gateway.contenders import CHUNKS, FULL, Load, Running, body, compiled, started
from loadtest.gateway.markdown import tables
from loadtest.gateway.measure import figures, run_load
from loadtest.gateway.report import Result, as_json, targets
from server.ports import free_port
from tests.waiting import wait_until

CORES = contenders.Cores.available()
STREAMS = Load("paced", body(stream=True, max_tokens=CHUNKS, seed=1), clients=4, seconds=0.3, warm_s=0.0)


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    log = tmp_path_factory.mktemp("mock") / "log"
    with contenders.running([str(compiled("upstream"))], log) as process:
        yield int(wait_until(log.read_text, process=process))  # the port, once it listens


@pytest.fixture(scope="module")
def whole(upstream: int) -> Iterator[Running]:
    """The gateway with everything on, before two instances of one version."""
    _, side = against.splits()
    with started(side, upstream, CORES) as gateway:
        yield gateway


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How soon a disconnect is passed on is the bench's matter."""
    monkeypatch.setattr("loadtest.gateway.cancel.GIVE_UP_S", 30.0)


def test_a_program_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the error says what to install."""
    program = compiled("client", tmp_path)
    made = program.stat().st_mtime_ns
    assert compiled("client", tmp_path).stat().st_mtime_ns == made
    assert [p.name for p in tmp_path.iterdir()] == [program.name]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(contenders.CannotBuild, match="apt-get install gcc"):
        compiled("client", tmp_path / "build")


def test_the_client_counts_what_the_upstream_sends(upstream: int) -> None:
    seen = run_load(STREAMS, Running(DIRECT, upstream, None, ""), CORES)
    assert seen.client["errors"] == 0
    # Each stream has its chunks, one more with the reason it ended, and [DONE].
    streams, events = seen.client["all_requests"], seen.client["all_events"]
    assert streams * (CHUNKS + 2) <= events <= (streams + STREAMS.clients) * (CHUNKS + 2)
    assert 0 < seen.quantiles["ttft_us"][0] <= seen.quantiles["latency_us"][0]
    assert seen.quantiles["latency_us"][0] > CHUNKS * 900  # paced by a millisecond, however late it is read
    found = figures("paced", seen, seen)  # over the direct ones
    assert found["added_ttft_us_p50"] == 0.0
    assert found["ttft_us_p50"] > 0.0


def test_large_prompts_arrive_whole(upstream: int) -> None:
    load = Load("large", body(size=220_000), clients=4, seconds=0.0, warm_s=0.0)
    seen = run_load(load, Running(DIRECT, upstream, None, ""), CORES)
    assert seen.client["errors"] == 0
    assert seen.client["requests"] > 0


def test_an_error_answer_is_counted(tmp_path: Path) -> None:
    script = (
        "import http.server as h\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        "    protocol_version = 'HTTP/1.1'\n"
        "    def do_POST(self): self.send_error(503)\n"
        "s = h.ThreadingHTTPServer(('127.0.0.1', 0), H); print(s.server_port, flush=True); s.serve_forever()"
    )
    with subprocess.Popen(["python3", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        load = Load("one", body(), clients=1, seconds=0.0, warm_s=0.0)
        seen = run_load(load, Running("refusing", port, server.pid, ""), CORES)
        server.kill()
    assert seen.client["errors"] > 0
    assert seen.client["requests"] == 0


@pytest.mark.broad
@pytest.mark.usefixtures("patient")
def test_the_whole_run_writes_its_figures(tmp_path: Path) -> None:
    loads = [Load("many", body(), clients=2, seconds=0.3), STREAMS]
    results = run(tmp_path / "g.json", rounds=1, only=[FULL], loads=loads)
    written = orjson.loads((tmp_path / "g.json").read_bytes())
    mine = written["contenders"][FULL]
    assert mine["figures"]["errors"]["high"] == 0
    assert {"requests_per_s", "cpu_us_per_request", "cpu_us_per_chunk", "added_ttft_us_p50", "rss_mb"} <= {
        *mine["figures"]
    }
    assert set(mine["cancel_ms"]) == set(STATES)
    assert all(ms is not None for times in results[FULL].cancel_ms.values() for ms in times)
    (memory,) = (t for t in written["targets"] if t["name"] == "RSS, MiB")
    assert memory["measured"] == mine["figures"]["rss_mb"]["median"]
    assert memory["met"] is (memory["measured"] <= memory["wanted"])
    assert written["machine"]["cores"] >= 1


def test_everything_is_on(whole: Running) -> None:
    url = f"http://127.0.0.1:{whole.port}/v1/chat/completions"
    assert httpx.post(url, content=body(), timeout=60).status_code == 401
    key = {"authorization": f"Bearer {contenders.KEY}"}
    answer = httpx.post(url, content=body(stream=True, max_tokens=3), headers=key, timeout=60)
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) > 0
    assert answer.text.count('"token_ids":[1234]') == 3  # it asks for streams that it could continue elsewhere


def test_a_contender_that_does_not_start_says_why(upstream: int) -> None:
    broken = contenders.Contender("broken", lambda _: ["python3", "-c", "raise SystemExit('no licence')"])
    with pytest.raises(contenders.CannotStart, match="no licence"), started(broken, upstream, CORES):
        pass


@pytest.mark.usefixtures("patient")
def test_an_upstream_that_answers_no_disconnect_is_told_apart() -> None:
    """Asked directly nobody closes anything for the client: the observer sees the client's own close."""
    port = free_port()
    with observing(port) as observer:
        for state in STATES[1:]:
            assert disconnect_ms(state, Running(DIRECT, port, None, ""), observer, port) is not None


def result(**values: float) -> Result:
    return Result("1", [dict(values)], {state: [1.0, 2.0, 30.0] for state in STATES})


def test_targets_compare_with_the_router() -> None:
    mine = {"requests_per_core_s": 15_500.0, "cpu_us_per_chunk": 17.0, "large_requests_per_s": 6e3, "rss_mb": 90.0}
    router = {"requests_per_core_s": 10_000.0, "cpu_us_per_chunk": 17.0, "large_requests_per_s": 3e3}
    found = {t.name: t for t in targets({FULL: result(**mine), contenders.ROUTER: result(**router)})}
    ratio = found["requests per second of core, over vllm-router's"]
    assert (ratio.measured, ratio.met) == (1.55, False)
    assert found["CPU of a paced chunk, over vllm-router's"].met
    assert found["220 KB prompts a second, over vllm-router's"].met
    assert not found["RSS, MiB"].met
    assert not found["added us at one client, p99"].met  # not measured
    assert not any("copying" in name for name in found)  # that contender did not run
    assert found["upstream closed, client left waiting, ms"].measured == 2.0
    lost = result()  # a disconnect that was not passed on misses the target
    lost.cancel_ms["waiting"] = [None, None, 3.0]
    waiting = next(t for t in targets({FULL: lost}) if "waiting" in t.name)
    assert (waiting.measured, waiting.met) == (None, False)


def test_who_failed_is_in_the_file() -> None:
    failed = Result("x==1", failed="x==1 does not install")
    written = as_json({FULL: result(rss_mb=1.0), "x": failed}, {"cores": 2})
    assert written["contenders"]["x"] == {"version": "x==1", "failed": "x==1 does not install"}


def test_each_contender_is_pinned() -> None:
    assert all(c.requirement is None or "==" in c.requirement for c in contenders.CONTENDERS)
    assert {FULL, contenders.ROUTER} <= {c.name for c in contenders.CONTENDERS}


def test_the_published_tables_are_those_of_the_published_figures() -> None:
    docs = Path(__file__).parents[2] / "docs"
    report = orjson.loads((docs / "benchmarks" / "gateway.json").read_bytes())
    assert tables(report) in (docs / "benchmarks.md").read_text()


def test_two_checkouts_are_asked_in_turn(tmp_path: Path) -> None:
    load = Load("many", body(), clients=2, seconds=0.1, warm_s=0.1)
    ratios = against.run(against.checkouts(against.HERE), tmp_path / "found.json", pairs=2, loads=[load])
    assert ratios["cpu_us_per_request"].pairs == 2
    assert ratios["cpu_us_per_request"].this > 0
    assert orjson.loads((tmp_path / "found.json").read_bytes())["figures"].keys() == {"cpu_us_per_request"}


def test_two_versions_share_the_requests_of_one_of_the_two(upstream: int, whole: Running) -> None:
    split, _ = against.splits()
    with started(split, upstream, CORES) as shared:
        for side, answered in ((shared, {"1": 10, "2": 10}), (whole, {})):
            assert all(contenders.answers(side.port) for _ in range(19))  # one has been asked already
            wait_until(lambda: of_versions(side.port) == answered)  # noqa: B023 - called at once


def of_versions(port: int) -> dict[str, int]:
    """How many requests a gateway has counted for each version that shares them. It counts one after its answer."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r'^hotswap_split_requests_total\{.*version="(\d)"\} (\d+)', text, re.MULTILINE)
    return {version: int(count) for version, count in found}


def test_compiled_and_not_are_not_compared(tmp_path: Path) -> None:
    made = tmp_path / "server/gateway/_compiled"
    if not (against.HERE / "server/gateway/_compiled").exists():
        made.mkdir(parents=True)
    with pytest.raises(contenders.CannotStart, match="is compiled"):
        against.checkouts(tmp_path)


def test_more_knowledge_hits_more(tmp_path: Path) -> None:
    rows = prefix_knowledge.run(tmp_path / "figures.json", small=True)
    assert rows == orjson.loads((tmp_path / "figures.json").read_bytes())["rows"]
    assert [(row["gateways"], row["stays"]) for row in rows] == list(prefix_knowledge.GATEWAYS)
    for row in rows:
        for way in ("own", "reports"):
            assert row["load"]["hits"] < row[way]["hits"] < row["events"]["hits"] < 1
    assert rows[-1]["own"]["hits"] < rows[-1]["reports"]["hits"], "who sent what is of no account"
    assert rows[0]["own"] == rows[0]["all"]  # one gateway has sent all there is


def test_an_engine_drops_the_end_of_a_prompt_first() -> None:
    engine = prefix_knowledge.Engine(0, capacity=3, running=[0])
    prompt = prefix_knowledge.chain(bytes(4 * 64))
    engine.use(prompt)
    assert engine.held(prompt) == 3
    other = prefix_knowledge.chain(b"x" * 128)
    engine.use(other)
    assert (engine.held(other), engine.held(prompt)) == (2, 1)
