"""Clients that train all weights: one at a time, whole versions of the running server, and what a crash leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types
from transformers import AutoModelForCausalLM

from tests.trainer.api.server import KEY, ApiServer, learn, new, sums
from tests.trainer.fleet import Fleet

SERVING = {"dtype": "bfloat16", "full": True}


@pytest.fixture
def service(api: ApiServer) -> Iterator[tinker.ServiceClient]:
    """Its session ends, so that the next one can have the weights."""
    found = api.service()
    yield found
    found.close("success").result(120)


def expected(model: str, steps: int, lr: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the weights by transformers and torch."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr, (0.9, 0.95), eps=1e-12, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        total = torch.zeros(())
        for datum in sums():
            logits = network(torch.tensor([datum.model_input.to_ints()])).logits[0, -1]
            total = total - logits.log_softmax(-1)[int(datum.loss_fn_inputs["target_tokens"].tolist()[-1])]
        losses.append(total.item())
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, network.state_dict()


def _carried(weight: torch.Tensor) -> torch.Tensor:
    """As the server has it, whose model is in bfloat16."""
    return weight.bfloat16().float()


def test_all_weights_are_trained_and_served(
    both: tuple[ApiServer, Fleet], service: tinker.ServiceClient, tiny_model: str
) -> None:
    """As torch's AdamW on transformers' model does; a saved one is a whole version, and so is the base model again."""
    api, running = both
    client = new(service, rank=0)
    assert client.get_info().is_lora is False
    losses, weights = expected(tiny_model, 4, 1e-3)
    assert learn(client, sums(), 4) == pytest.approx(losses, rel=1e-4)
    path = client.save_weights_for_sampler("four").result().path
    served, begun = running.server.model.state_dict(), load_file(Path(tiny_model) / "model.safetensors")
    for name, weight in weights.items():  # Adam takes a full step by a gradient that is nearly zero, whatever its sign
        moved, off = (weight - begun[name]).abs().mean(), (served[name] - _carried(weight)).abs().mean()
        assert 0 < moved < 1, name
        assert off < 0.05 * moved, (name, off, moved)
    (saved,) = (api.root / "api/models" / client.model_id / "sampler_weights").iterdir()
    AutoModelForCausalLM.from_pretrained(saved)
    prompt, params = types.ModelInput.from_ints([4, 13, 5, 14]), types.SamplingParams(max_tokens=1, temperature=0.0)
    base = service.create_sampling_client(base_model="tiny").result()
    trained = service.create_sampling_client(model_path=path).result()
    versions = []
    for sampler, file in ((base, Path(tiny_model)), (trained, saved), (base, Path(tiny_model))):
        sampler.sample(prompt, 1, params).result()
        versions.append(running.server.version)
        tensors = load_file(file / "model.safetensors")
        assert all(torch.equal(running.server.model.state_dict()[name], _carried(t)) for name, t in tensors.items())
    assert versions == sorted(set(versions)), "each took the server's weights in turn"
    rest = tinker.RestClient(base_url=api.url, api_key=KEY)
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.is_lora, info.lora_rank, info.train_unembed) == (False, None, True)


def test_a_state_goes_on_where_it_was(service: tinker.ServiceClient, api: ApiServer) -> None:
    """In a client of its own, and after a kill with a gradient that no step has taken."""
    client = new(service, rank=0)
    learn(client, sums(), 2)
    path = client.save_state("two").result().path
    wanted = learn(client, sums(), 2)
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    first = resumed.forward_backward(sums(), "cross_entropy").result().metrics["loss:sum"]
    api.restart()
    resumed.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    assert [first, *learn(resumed, sums(), 1)] == wanted
    assert learn(client, sums(), 1)[0] < wanted[-1], "the first one is as it was left"


def test_one_session_at_a_time(service: tinker.ServiceClient, api: ApiServer) -> None:
    client = new(service, rank=0)
    other = api.service("tml-another")
    with pytest.raises(tinker.BadRequestError, match="one at a time may"):
        new(other, rank=0)
    learn(client, sums(), 1)
    service.close("success").result(120)
    assert learn(new(other, rank=0), sums(), 1)
    refused = api.post("optim_step", json={"model_id": client.model_id, "seq_id": 3, "adam_params": {}})
    answer = api.post("retrieve_future", json={"request_id": refused.json()["request_id"]}).json()
    assert "one at a time may" in answer["error"]
    other.close("success").result(120)


def test_adapters_are_refused(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.BadRequestError, match="create the client with rank=0"):
        new(service)
