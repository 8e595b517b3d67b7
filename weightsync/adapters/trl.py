"""TRL's trainers in server mode (GRPO, RLOO, OnlineDPO), with Hotswap as their vLLM server.

    from weightsync import Publisher
    from weightsync.adapters.trl import use

    use(lambda: Publisher("sqlite:///run/store.db", model="demo"))
    trainer = GRPOTrainer(..., args=GRPOConfig(
        use_vllm=True, vllm_mode="server", vllm_server_base_url="http://127.0.0.1:8000"))

TRL asks the public port for completions. It writes weights over an NCCL group that it forms with the engines; here the
publisher writes them, and each synchronisation is one version and one swap. `PublishCallback` is for every other
trainer of transformers and TRL.

Of TRL this replaces `VLLMClient` by a subclass of the same name, in its own module and in those that have imported it.
Tried with TRL 1.16.0; tests/contract/test_trl.py holds the names against what is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from weightsync.control.parts import LORA, Adapter
from weightsync.errors import PublishError

if TYPE_CHECKING:
    from weightsync.publish.publisher import Publisher
    from weightsync.publish.remote import RemotePublisher

    AnyPublisher = Publisher | RemotePublisher

CLIENT = "trl.generation.vllm_client"


def use(
    publisher: AnyPublisher | Callable[[], AnyPublisher],
    *,
    timeout_s: float = 600.0,
    logprobs_mode: str = "raw_logprobs",
) -> type:
    """Have every trainer that is made from now on publish its weights by `publisher`. Call it in each process, before
    the trainer is made.

    `publisher`, or a function that makes one, which the main process alone calls, once. `timeout_s`: of each swap.
    `logprobs_mode`: the instances' setting, which TRL asks for and warns of. Floating-point tensors are converted to
    the dtypes that are served. Returns the class that replaces TRL's client.
    """
    stock = importlib.import_module(CLIENT).VLLMClient
    stock = getattr(stock, "hotswap_stock", stock)
    settings = {"hotswap_stock": stock, "hotswap_publisher": _once(publisher), "hotswap_timeout_s": timeout_s}
    settings |= {"hotswap_logprobs_mode": logprobs_mode, "__doc__": stock.__doc__, "__module__": __name__}
    made = type("VLLMClient", (_Client, stock), settings)
    for module in [m for name, m in list(sys.modules.items()) if name.startswith("trl.")]:
        found = vars(module).get("VLLMClient")
        if isinstance(found, type) and getattr(found, "hotswap_stock", found) is stock:
            vars(module)["VLLMClient"] = made
    return made


def _once(publisher: AnyPublisher | Callable[[], AnyPublisher]) -> Callable[[], AnyPublisher]:
    made: list[AnyPublisher] = []

    def get() -> AnyPublisher:
        if not made:
            made.append(publisher() if callable(publisher) else publisher)
        return made[0]

    return get


class _Client:
    """The methods of TRL's client that write weights."""

    model: str
    hotswap_publisher: Callable[[], AnyPublisher]
    hotswap_timeout_s: float
    hotswap_logprobs_mode: str
    _collected: dict[str, Any] | None = None

    def get_server_info(self) -> dict[str, Any]:
        """As far as TRL reads it."""
        return {"weight_transfer_config": None, "model_config": {"logprobs_mode": self.hotswap_logprobs_mode}}

    def init_communicator(self, device: Any = 0) -> None:
        """No group is formed. Raises PublishError if the publisher writes another model than the server's."""
        publisher = type(self).hotswap_publisher()
        if publisher.model != self.model:
            raise PublishError(
                f"the server's model is {self.model!r}, and the publisher writes {publisher.model!r}: "
                f"make it with model={self.model!r}"
            )

    @contextlib.contextmanager
    def weight_update(self) -> Iterator[None]:
        """The tensors that are written inside become one version. After an error nothing is published."""
        self._collected = {}
        try:
            yield
            self._publish(self._collected.items())
        finally:
            self._collected = None

    def update_named_param(self, name: str, weights: Any) -> None:
        """One tensor of a `weight_update`. It is copied: a gathered one is gone a moment later."""
        self.update_named_params([], iter([(name, weights)]))

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, Any]]) -> None:
        """All tensors of the model, one at a time; inside of a `weight_update` those are added to it."""
        if self._collected is not None:
            self._collected |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in named_params}
            return
        try:
            self._publish(named_params)
        finally:
            for _ in named_params:  # each is gathered by all processes, and the others go on to the last one
                pass

    def reset_prefix_cache(self) -> None:
        """Nothing to do: no request reads cached blocks that other weights computed."""

    def close_communicator(self) -> None:
        """There is none; the publisher is closed by the program that made it."""

    def _publish(self, tensors: Iterable[tuple[str, Any]]) -> None:
        type(self).hotswap_publisher().publish(tensors, cast=True, timeout_s=self.hotswap_timeout_s)


class PublishCallback(TrainerCallback):  # type: ignore[misc] # transformers has no types
    """Publishes the model every so many steps, and at the end of training; a PEFT model as the adapter `adapter`.

    For a trainer whose main process has all of the model. A version's step is the trainer's.
    """

    def __init__(self, publisher: AnyPublisher, *, every: int = 1, adapter: str = "", timeout_s: float = 600.0) -> None:
        """`every`: optimizer steps. Raises PublishError."""
        if every < 1:
            raise PublishError(f"every cannot be {every}: pass a number of steps from 1 on")
        self._publisher, self._every, self._adapter, self._timeout_s = publisher, every, adapter, timeout_s
        self._published = -1

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """transformers'. Raises as `Publisher.publish`."""
        if state.global_step % self._every == 0:
            self._publish(state, more["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """transformers'. Raises as `Publisher.publish`."""
        self._publish(state, more["model"])

    def _publish(self, state: Any, model: Any) -> None:
        if not state.is_world_process_zero or state.global_step == self._published:
            return
        model = getattr(model, "module", model)  # of DistributedDataParallel
        about = {"step": state.global_step, "timeout_s": self._timeout_s}
        if hasattr(model, "peft_config"):
            if not self._adapter:
                raise PublishError("the model is a PEFT model: pass adapter=NAME, by which clients ask for it")
            self._publisher.publish(Adapter.from_peft(model), part=LORA + self._adapter, **about)
        else:
            self._publisher.publish(model.named_parameters(), cast=True, **about)
        self._published = state.global_step
