"""The stock SDK trains, saves, loads and samples; clients do not disturb each other; what cannot be done says why."""

from __future__ import annotations

import math
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
import torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from tests.etcd import Tls
from tests.trainer.api.server import KEY, ApiServer, datum, learn, loss_of, new, serving, sums
from tests.trainer.fleet import Fleet
from weightsync.control.parts import ADAPTER_CONFIG
from weightsync.memory.receiver import SlotReader
from weightsync.publish.publisher import Publisher

pytestmark = pytest.mark.contract
SERVING = {"limits": {"rank": 16, "models": 60, "resident": 2, "served": 2}}


def test_a_supervised_loop_lowers_the_loss(service: tinker.ServiceClient) -> None:
    client = new(service, rank=8)
    losses = learn(client, sums(), 30)
    assert losses[-1] < 0.5 * losses[0]
    assert client.get_info().lora_rank == 8
    assert client.get_tokenizer().encode("1+2=") == [4, 13, 5, 14]


def test_a_batch_in_several_requests_is_one_batch(
    service: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK cuts a large one, and sends the first part last."""
    whole, cut = new(service), new(service)
    expected = learn(whole, sums(), 3)
    small = cut.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 3})
    monkeypatch.setattr(cut.holder, "_client_config", small)
    assert learn(cut, sums(), 3) == pytest.approx(expected, rel=1e-5)


def test_a_custom_loss_is_the_built_in_one_where_they_are_the_same(service: tinker.ServiceClient) -> None:
    data = [datum([*d.model_input.to_ints(), 3], weights=[1.0] * d.model_input.length) for d in sums()]

    def likelihood(_: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.stack([row.sum() for row in logprobs]).sum(), {"rows": float(len(logprobs))}

    ours, theirs = new(service), new(service)
    for _ in range(3):
        passed, stepped = theirs.forward_backward_custom(data, likelihood), theirs.optim_step(types.AdamParams())
        assert passed.result().metrics["rows"] == len(data)
        stepped.result()
    learn(ours, data, 3, lr=1e-4)
    said = [client.forward(data, "cross_entropy").result().metrics["loss:sum"] for client in (ours, theirs)]
    assert said[0] == pytest.approx(said[1], rel=1e-6)


def test_clients_do_not_disturb_each_other(service: tinker.ServiceClient, api: ApiServer) -> None:
    """More of them than stay in memory, of several ranks, by turns: each learns as it does alone."""
    other = sums()[::-1][:7]
    alone = learn(new(service, rank=4), sums(), 6), learn(new(service, rank=9), other, 6)
    first, second, third = new(service, rank=4), new(service, rank=9), new(service, rank=2, train_mlp=False)
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(6):
        passes = [
            first.forward_backward(sums(), "cross_entropy"),
            second.forward_backward(other, "cross_entropy"),
            third.forward_backward(sums(), "cross_entropy"),
        ]
        for client in (first, second, third):
            client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        for losses, passed in zip(found, passes, strict=False):
            losses.append(passed.result().metrics["loss:sum"])
    assert found == alone
    stranger = api.service("tml-another")
    with pytest.raises(tinker.NotFoundError, match="of this key"):
        stranger.create_training_client_from_state(f"tinker://{first.model_id}/weights/any").result()


def test_a_state_goes_on_where_it_was(service: tinker.ServiceClient, client: tinker.TrainingClient) -> None:
    learn(client, sums(), 4)
    path = client.save_state("four", user_metadata={"by": "test"}).result().path
    expected = learn(client, sums(), 3)
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert learn(resumed, sums(), 3) == expected
    fresh = service.create_training_client_from_state(path).result()
    without = learn(fresh, sums(), 3)
    assert without[0] == expected[0]
    assert without[2] != expected[2]  # Adam began anew
    with pytest.warns(FutureWarning):
        client.load_state_with_optimizer(path).result()
    assert learn(client, sums(), 3) == expected
    rest = tinker.RestClient(base_url=service.holder._base_url, api_key=KEY)
    (listed,) = rest.list_checkpoints(client.model_id).result().checkpoints
    assert (listed.tinker_path, listed.user_metadata) == (path, {"by": "test"})
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    assert listed.expires_at is None
    for seconds in (7200, None):
        rest.set_checkpoint_ttl_from_tinker_path(path, seconds).result()
        (listed,) = rest.list_checkpoints(client.model_id).result().checkpoints
        assert (listed.expires_at is None) is (seconds is None)
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds 60 is out of range"):
        rest.set_checkpoint_ttl_from_tinker_path(path, 60).result()
    later = client.save_state("later").result().path
    first, second = (rest.list_user_checkpoints(limit=1, offset=offset).result() for offset in (0, 1))
    assert [page.checkpoints[0].tinker_path for page in (first, second)] == [later, path]
    assert first.cursor == types.Cursor(offset=0, limit=1, total_count=second.cursor.total_count)
    assert service.holder._session_id in rest.list_sessions(limit=1000).result().sessions
    stranger = tinker.RestClient(base_url=service.holder._base_url, api_key="tml-another")
    assert not {path, later} & {c.tinker_path for c in stranger.list_user_checkpoints().result().checkpoints}
    with pytest.raises(tinker.NotFoundError, match="of this key"):
        stranger.set_checkpoint_ttl_from_tinker_path(path, None).result()
    rest.delete_checkpoint_from_tinker_path(later).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(client.model_id).result().checkpoints == []


def test_a_state_that_is_not_whole_is_refused(client: tinker.TrainingClient, api: ApiServer) -> None:
    """The one who wanted it goes on as before."""
    learn(client, sums(), 1)
    expected = loss_of(client)
    for number, (name, damage, says) in enumerate(
        [
            ("model-*.safetensors", lambda file: file.unlink(), "is missing"),
            ("model-*.safetensors", lambda file: os.truncate(file, file.stat().st_size - 8), "is damaged"),
            ("state.json", lambda file: file.unlink(), "cannot be read"),
            ("state.json", lambda file: file.write_text("{}"), "cannot be read"),
        ]
    ):
        path = client.save_state(f"to-break-{number}").result().path
        newest = max((api.root / "api/models" / client.model_id / "weights").iterdir(), key=lambda d: int(d.name))
        damage(next(newest.glob(name)))
        with pytest.warns(FutureWarning), pytest.raises(tinker.RequestFailedError, match=says):
            client.load_state(path).result()
        assert loss_of(client) == expected


def test_a_saved_adapter_is_an_edition_that_requests_pin(
    both: tuple[ApiServer, Fleet], service: tinker.ServiceClient, client: tinker.TrainingClient
) -> None:
    """Three snapshots have two names by turns, no answer may come from the one that had the name before, and nothing
    is swapped."""
    _, running = both
    before, samplers = len(running.versions), []
    for _ in range(2):
        learn(client, sums(), 1)
        samplers.append(client.save_weights_and_get_sampling_client().result())
    path = client.save_weights_for_sampler("named").result().path
    samplers.append(service.create_sampling_client(model_path=path).result())
    prompt, asked = types.ModelInput.from_ints([4, 13, 5, 14]), []
    for sampler in samplers:
        params = types.SamplingParams(max_tokens=3, temperature=1.0, seed=5, top_p=0.9, stop=[1])
        answer = sampler.sample(prompt, 2, params).result()
        assert len(answer.sequences) == 2
        assert all(len(s.tokens) == len(s.logprobs or []) > 0 for s in answer.sequences)
        asked.append(running.server.requests[-1])
    with Publisher(running.store_url, model="tiny", lineage="reader") as reader:
        editions = reader.editions()
    assert [body["model"] for body in asked[1:]] == [edition.full_name for edition in editions]
    names = [body["model"].partition("@")[0] for body in asked]
    assert names == ["tinker-1", "tinker-0", "tinker-1"], "each takes the name that was used longest ago"
    assert len(running.versions) == before
    assert (asked[0]["n"], asked[0]["top_p"], asked[0]["stop_token_ids"]) == (2, 0.9, [1])
    with SlotReader.open(editions[0].slot, manifest_digest=editions[0].manifest_digest) as slot:
        assert '"r":4' in slot.manifest.metadata[ADAPTER_CONFIG]
    base = service.create_sampling_client(base_model="tiny").result()
    base.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result()
    assert "model" not in running.server.requests[-1]


def test_a_key_is_the_gateways(both: tuple[ApiServer, Fleet], service: tinker.ServiceClient) -> None:
    api, running = both
    sampler = service.create_sampling_client(base_model="tiny").result()
    sampler.sample(types.ModelInput.from_ints([4]), 1, types.SamplingParams(max_tokens=1)).result()
    assert running.server.headers[-1]["authorization"] == "Bearer somebody"
    assert httpx.post(f"{api.url}/api/v1/create_session").status_code == 401


def test_what_the_server_can_do(service: tinker.ServiceClient) -> None:
    found = tinker.RestClient(base_url=service.holder._base_url, api_key=KEY).get_server_capabilities().result()
    (model,) = found.supported_models
    assert (model.model_name, model.max_context_length, model.trainable) == ("tiny", 128, True)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda s: s.create_lora_training_client(base_model="gpt-9").result(), "use 'tiny'"),
        (lambda s: new(s, rank=17), "use 1 to 16"),
        (lambda s: new(s, train_mlp=False, train_attn=False), "set train_attn or train_mlp"),
        (lambda s: new(s, optimizer=types.DimuonOptimizerConfig()), "use AdamW"),
        (lambda s: s.create_sampling_client(model_path="tinker://a/weights/b").result(), "sampler_weights"),
        (lambda s: s.create_training_client_from_state("tinker://a/weights/b").result(), "was not saved"),
    ],
    ids=["model", "rank", "nothing", "optimizer", "kind", "checkpoint"],
)
def test_a_client_that_cannot_be_made(
    service: tinker.ServiceClient, make: Callable[[tinker.ServiceClient], Any], says: str
) -> None:
    with pytest.raises((tinker.BadRequestError, tinker.NotFoundError), match=says):
        make(service)


ONES = types.TensorData(data=[1.0, 1.0], dtype="float32", shape=[2])


def _fields(**inputs: Any) -> list[types.Datum]:
    return [datum([3, 4, 5], **inputs)]


@pytest.mark.parametrize(
    ("data", "loss", "config", "says"),
    [
        (_fields(), "stable_reinforce", None, "use one of cross_entropy"),
        (_fields(), "ppo", None, "'logprobs'"),
        (_fields(logprobs=[0.0, 0.0], advantages=[1.0, 1.0]), "gspo", None, "'sequence_ratio_mask'"),
        (_fields(weights=[1.0]), "cross_entropy", None, "give one each"),
        (_fields(weights=[1.0, math.nan]), "cross_entropy", None, "not finite"),
        (_fields(mask=ONES), "cross_entropy", None, "reads target_tokens, weights alone"),
        (_fields(), "cross_entropy", {"beta": 1.0}, "takes no options"),
        (_fields(logprobs=[0.0, 0.0], advantages=[1.0, 1.0]), "ppo", {"clip": 1.0}, "clip_low_threshold"),
        ([datum([3, 99, 5])], "cross_entropy", None, "from 0 to 15"),
        ([datum([3] * 300)], "cross_entropy", None, "the model's context"),
    ],
    ids=["loss", "field", "mask", "length", "nan", "unknown", "option", "name", "token", "context"],
)
def test_a_batch_that_cannot_be_computed_changes_nothing(
    service: tinker.ServiceClient, data: list[types.Datum], loss: Any, config: Any, says: str
) -> None:
    client = new(service)
    client.forward_backward(sums(), "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match=says) as refused:
        client.forward_backward(data, loss, config).result()
    assert refused.value.category == types.RequestErrorCategory.User
    again = new(service)
    again.forward_backward(sums(), "cross_entropy")
    norms = [c.optim_step(types.AdamParams()).result().metrics for c in (client, again)]
    assert norms[0] == norms[1]  # and the client goes on


def test_other_requests_that_cannot_be_done(service: tinker.ServiceClient) -> None:
    client, narrow = new(service), new(service, rank=2)
    with pytest.raises(tinker.RequestFailedError, match="call forward_backward before"):
        client.optim_step(types.AdamParams()).result()
    path = client.save_state("once").result().path
    with pytest.raises(tinker.RequestFailedError, match="set overwrite"):
        client.save_state("once").result()
    client.save_state("once", overwrite=True).result()
    with pytest.raises(tinker.RequestFailedError, match="no name for a checkpoint"):
        client.save_state("../etc").result()
    with pytest.warns(FutureWarning), pytest.raises(tinker.RequestFailedError, match=r"rank 4 .* trains .* rank 2"):
        narrow.load_state(path).result()
    sampler = service.create_sampling_client(base_model="tiny").result()
    long, empty = types.ModelInput.from_ints([3]), types.ModelInput.empty()
    for prompt, tokens, says in ((long, 1000, "exceed the context of 128"), (empty, 1, "is empty")):
        with pytest.raises(tinker.RequestFailedError, match=says):
            sampler.sample(prompt, 1, types.SamplingParams(max_tokens=tokens)).result()


def test_a_repeated_request_is_executed_once(
    service: tinker.ServiceClient, client: tinker.TrainingClient, api: ApiServer
) -> None:
    given = types.ForwardBackwardInput(data=sums(), loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id=client.model_id, seq_id=1)
    content = forward_backward_request_to_proto(request).SerializeToString()
    answers = [api.post("forward_backward", content=content).json() for _ in range(3)]
    assert answers == [{"request_id": f"{client.model_id}:1", "model_id": client.model_id}] * 3
    step = {"model_id": client.model_id, "seq_id": 2, "adam_params": {"learning_rate": 1e-3}}
    for _ in range(2):
        assert api.post("optim_step", json=step).status_code == 200
    once = [api.post("retrieve_future", json={"request_id": f"{client.model_id}:2"}).json() for _ in range(2)]
    other = new(service)
    other.forward_backward(sums(), "cross_entropy")
    metrics = other.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics
    assert once == [{"metrics": metrics}] * 2
    changed = api.post("optim_step", json=step | {"adam_params": {"learning_rate": 1.0}})
    assert (changed.status_code, changed.json()["error"]["code"]) == (400, "sequence_reused")


def test_requests_that_no_sdk_sends(client: tinker.TrainingClient, api: ApiServer) -> None:
    own, future = {"model_id": client.model_id, "seq_id": 1}, {"request_id": f"{client.model_id}:0"}
    cases: list[tuple[int, str, dict[str, Any]]] = [
        (400, "forward_backward", {"content": b"\xff\xff"}),
        (400, "forward_backward", {"content": b"x", "headers": {"content-encoding": "zstd"}}),
        (400, "optim_step", {"content": b"{"}),
        (404, "optim_step", {"json": {"model_id": "nobody", "seq_id": 1}}),
        (404, "optim_step", {"json": own, "key": "tml-another"}),
        (404, "retrieve_future", {"json": future, "key": "tml-another"}),
        (410, "retrieve_future", {"json": {"request_id": f"{client.model_id}:77"}}),
    ]
    assert [api.post(route, **request).status_code for _, route, request in cases] == [status for status, *_ in cases]
    assert api.post("retrieve_future", json=future).json()["model_id"] == client.model_id
    session = client.model_id.split(":")[0]
    whole = {"session_id": session, "model_seq_id": 99, "base_model": "tiny"}
    refused = api.post("create_model", json=whole)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "full_training_unsupported")


def test_it_speaks_https(both: tuple[ApiServer, Fleet], tmp_path: Path) -> None:
    other, running = both
    tls = Tls(tmp_path)
    files = {"ssl_certfile": str(tls.server_cert), "ssl_keyfile": str(tls.server_key)}
    api = ApiServer(tmp_path, other.config["model"]["path"], running.server.url, running.store_url, **files)
    api.verify = ssl.create_default_context(cafile=str(tls.ca))
    with api.running():
        assert httpx.get(f"{api.url}/api/v1/healthz", verify=api.verify).json() == {"status": "ok"}


def test_limits_of_a_key(tiny_model: str, tmp_path: Path) -> None:
    with serving(tmp_path, tiny_model, limits={"models": 1, "pending": 2, "body_mb": 1}) as (api, _):
        service = api.service()
        client = new(service)
        with pytest.raises(tinker.BadRequestError, match="1 training clients, which is the limit"):
            new(service)
        step = {"model_id": client.model_id, "adam_params": {}}
        assert [api.post("optim_step", json=step | {"seq_id": n}).status_code for n in (5, 6, 7)] == [200, 200, 429]
        assert api.post("forward_backward", content=bytes(2 << 20)).status_code == 400
        api_url = f"{api.url}/api/v1/training_runs/{client.model_id}"
        assert httpx.delete(api_url, headers={"x-api-key": KEY}).status_code == 204
        assert not (tmp_path / "api/models" / client.model_id).exists()
        new(service)
