"""A server that is killed loses nothing that it has acknowledged, and does nothing twice."""

from __future__ import annotations

import contextlib
import http.client
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tests.trainer.api.server import KEY, ApiServer, learn, loss_of, new, sums
from tests.trainer.fleet import Fleet
from tests.waiting import wait_until

PASS, STEP = "forward_backward", "optim_step"


def trained(
    service: tinker.ServiceClient, happens: Callable[[int, str], object] = lambda _step, _moment: None
) -> tuple[list[float], float]:
    """The losses of three steps on two batches each, and the one after them. `happens` is called at each moment."""
    client, losses = new(service), []
    for step in range(3):
        for data, moment in ((sums(), "between two passes"), (sums()[:5], "before the step")):
            losses.append(client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
            happens(step, moment)
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        happens(step, "after the step")
    return losses, loss_of(client)


@pytest.mark.parametrize("killed", ["between two passes", "before the step", "after the step"])
def test_killed_between_requests(api: ApiServer, service: tinker.ServiceClient, killed: str) -> None:
    """Gradients that were acknowledged count, as do steps: the losses are those of a server that was not killed."""

    def happens(step: int, moment: str) -> None:
        if (step, moment) == (1, killed):
            api.restart()

    assert trained(service, happens) == trained(service)


def test_killed_in_the_middle_of_a_pass(api: ApiServer, service: tinker.ServiceClient) -> None:
    """The SDK waits for the answers through the restart: the pass is executed again, and the step after it once."""
    data = sums() * 300
    calm, client = new(service), new(service)
    expected = learn(calm, sums(), 1) + learn(calm, data, 1), loss_of(calm)
    first = learn(client, sums(), 1)
    passed = client.forward_backward(data, "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=1e-3))

    def open_requests() -> list[Any]:
        found = api.journal("SELECT kind FROM requests WHERE done IS NULL AND model = ?", client.model_id)
        return [kind for (kind,) in found]

    wait_until(lambda: open_requests()[-1:] == [STEP], 120, what="both requests are on disk")
    assert PASS in open_requests(), "the pass is over before the kill: make it longer"
    api.kill()
    assert PASS in open_requests()
    api.start()
    losses = [*first, passed.result().metrics["loss:sum"]]
    stepped.result()
    assert (losses, loss_of(client)) == expected
    assert open_requests() == []


def test_a_request_whose_acknowledgement_was_lost_is_not_executed_again(
    api: ApiServer, service: tinker.ServiceClient
) -> None:
    """The client sends the step once more after the restart, and hears what it would have heard."""
    calm, client = new(service), new(service)
    learn(calm, sums(), 1)
    client.forward_backward(sums(), "cross_entropy").result()
    step = {"model_id": client.model_id, "seq_id": 2, "adam_params": {"learning_rate": 1e-3}}
    answers = []
    for _ in range(2):
        assert api.post("optim_step", json=step).json()["request_id"] == f"{client.model_id}:2"
        answers.append(api.post("retrieve_future", json={"request_id": f"{client.model_id}:2"}).json())
        api.restart()
    assert answers[0] == answers[1]
    client._request_id_counter, client._turn_counter = 2, 2  # it has sent number 2 by itself
    assert loss_of(client) == loss_of(calm)


def test_what_was_refused_stays_refused(api: ApiServer, client: tinker.TrainingClient) -> None:
    """A gradient that is not finite is dropped, and does not come back with the restart."""
    before = loss_of(client)
    broken = [
        types.Datum(d.model_input, {**d.loss_fn_inputs, "weights": [3e38] * d.model_input.length}) for d in sums()
    ]
    client.forward_backward(broken, "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="the weights are as before"):
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    api.restart()
    with pytest.raises(tinker.RequestFailedError, match="call forward_backward before"):
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    assert loss_of(client) == before


def test_checkpoints_and_samplers_outlive_the_server(
    api: ApiServer, service: tinker.ServiceClient, client: tinker.TrainingClient
) -> None:
    learn(client, sums(), 2)
    path, expected = client.save_state("kept").result().path, loss_of(client)
    sampler = client.save_weights_and_get_sampling_client().result()
    api.restart()
    assert loss_of(service.create_training_client_from_state(path).result()) == expected
    answer = sampler.sample(types.ModelInput.from_ints([4, 13]), 1, types.SamplingParams(max_tokens=2)).result()
    assert answer.sequences[0].tokens


def test_a_sample_that_was_under_way_is_asked_for_again(both: tuple[ApiServer, Fleet]) -> None:
    api, running = both
    sampler = api.service().create_sampling_client(base_model="tiny").result()
    before = len(running.server.requests)
    running.server.ready = lambda: False
    try:
        future = sampler.sample(types.ModelInput.from_ints([4, 13]), 1, types.SamplingParams(max_tokens=2))
        wait_until(lambda: len(running.server.requests) > before, 120, what="the gateway has the request")
        api.restart()
    finally:
        running.server.ready = lambda: True
    assert future.result(timeout=240).sequences[0].tokens
    assert len(running.server.requests) == before + 2


def test_a_request_that_the_ranks_did_not_outlive_is_tried_no_more(api: ApiServer) -> None:
    """The journal says that it has ended them three times; the client goes on with the next one."""
    client, calm = new(api.service()), new(api.service())
    learn(calm, sums(), 1)
    about = (f"{client.model_id}:1", client.model_id, json.dumps({"times": 3}))
    with contextlib.closing(sqlite3.connect(api.root / "api/journal.db")) as db:
        db.execute("INSERT INTO records VALUES ('fault', ?, 'somebody', ?, 0, ?)", about)
        db.commit()
    with pytest.raises(tinker.RequestFailedError, match="begun 3 times, and the server's ranks did not outlive it"):
        client.forward_backward(sums(), "cross_entropy").result()
    learn(client, sums(), 1)
    assert loss_of(client) == loss_of(calm)


def test_the_start_event_tells_where_it_serves_what(api: ApiServer) -> None:
    told, *_ = [json.loads(line) for line in api.log.read_text().splitlines() if line.startswith("{")]
    assert told.pop("time") > 0
    served = {"model": "tiny", "store": api.config["publish"]["store"]}
    assert told == {"event": "start", "devices": ["cpu"], "address": api.url} | served


def test_a_directory_has_one_server_and_so_has_a_port(api: ApiServer, tmp_path: Path) -> None:
    second = ApiServer(tmp_path, api.config["model"]["path"], api.config["gateway"]["url"], "sqlite:///none")
    (own := tmp_path / "own").mkdir()
    for changed, says in (
        ({"directory": api.config["directory"]}, "is another server's"),
        ({"directory": str(own), "port": api.port}, f"port: cannot listen at 127.0.0.1:{api.port}"),
    ):
        second.config |= changed
        second.log.unlink(missing_ok=True)
        with pytest.raises(AssertionError, match=says):
            second.start()
        assert second.process.wait(120) == 2


def test_a_server_that_is_asked_to_end_says_so_to_who_waits(api: ApiServer, client: tinker.TrainingClient) -> None:
    """With its exit status 0; and the SDK goes on after the next start."""
    passed = client.forward_backward(sums() * 200, "cross_entropy")
    waiting = "SELECT seq FROM requests WHERE done IS NULL ORDER BY seq DESC"
    ((last,), *_) = wait_until(lambda: api.journal(waiting), 120, what="a part of it is on disk")
    asking = http.client.HTTPConnection("127.0.0.1", api.port, timeout=120)
    about = json.dumps({"request_id": f"{client.model_id}:{last}"})
    asking.request("POST", "/api/v1/retrieve_future", about, {"x-api-key": KEY, "content-type": "application/json"})
    assert api.answers()  # in the order that they are asked in: it has read the question before it is to end
    api.process.terminate()
    answer = asking.getresponse()
    assert (answer.status, json.load(answer)["error"]["code"]) == (503, "server_ended")
    asking.close()
    assert api.process.wait(120) == 0
    api.start()
    assert passed.result(timeout=120).metrics["loss:sum"] > 0
