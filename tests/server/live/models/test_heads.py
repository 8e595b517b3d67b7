"""Heads that propose tokens, EAGLE's and MTP's, swapped beside the target whose embedding and head they run.

The targets answer by the last token alone: their layers add nothing. A head that looks the token up as they do knows
every answer; a random one knows none. So the share of proposed tokens that the target takes tells which head runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.models.kinds import make_kind
from tests import stock
from tests.live import VLLM_ARGS, LiveServer
from tests.server.live.models.test_parts import PROMPTS, acceptance, pushed

pytestmark = [pytest.mark.engine, pytest.mark.broad]
Tensors = dict[str, torch.Tensor]
HIDDEN = 128
EYE = torch.eye(HIDDEN)
KNOWS_ALL, KNOWS_NONE = 0.9, 0.3  # least and most of the proposed tokens that are taken


def edited(path: Path, edit: Callable[[Tensors], Tensors], **config: Any) -> Path:
    """The checkpoint in `path` with other tensors, and with `config` in its configuration."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = {name: t.to(torch.bfloat16).clone() for name, t in edit(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | config))
    return path


def silent(tensors: Tensors) -> Tensors:
    """Layers that add nothing to what goes through them, and a norm of ones."""
    quiet = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
    return {
        n: torch.zeros_like(t) if n.endswith(quiet) else torch.ones_like(t) if n == "model.norm.weight" else t
        for n, t in tensors.items()
    }


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def llama(path: Path, seed: int) -> Path:
    return edited(make_kind(path, "llama", seed=seed), silent)


def eagle(path: Path, *, knows: bool, **more: torch.Tensor) -> Path:
    """A head of one layer over (embedding of the token, hidden state of the target)."""

    def edit(tensors: Tensors) -> Tensors:
        layer = {
            name.removeprefix("model."): tensor if knows else tensor + noise(1, *tensor.shape)
            for name, tensor in silent(tensors).items()
            if name.startswith("model.layers.0.") and "input_layernorm" not in name
        }
        fuse = torch.cat([EYE, torch.zeros(HIDDEN, HIDDEN)], 1) if knows else noise(2, HIDDEN, 2 * HIDDEN)
        return layer | {"fc.weight": fuse} | more

    return edited(make_kind(path, "llama", num_hidden_layers=1), edit)


def check(live: LiveServer, answers: list[list[int]], *, knows: bool) -> None:
    """These are its answers, and the head that runs is the one that knows all of them, or none."""
    taken, said = acceptance(live)
    assert said == answers
    assert taken > KNOWS_ALL if knows else taken < KNOWS_NONE


def eagle_server(target: Path, draft: Path, state: Path) -> LiveServer:
    speculation = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 3}
    return LiveServer(target, state, (*VLLM_ARGS, "--speculative-config", json.dumps(speculation)))


def test_an_eagle_head_swaps_beside_its_target(tmp_path: Path) -> None:
    """It runs the target's embedding and head, which stay the target's: a new target's head is the draft's at once."""
    targets = [llama(tmp_path / f"target-{seed}", seed) for seed in (0, 1)]
    good, poor = (eagle(tmp_path / f"eagle-{knows}", knows=knows) for knows in (True, False))
    expected = [stock.answers(target, PROMPTS, 24) for target in targets]
    assert expected[0] != expected[1]
    with eagle_server(targets[0], poor, tmp_path / "state").running() as live:
        check(live, expected[0], knows=False)
        pushed(live, good, "draft")
        check(live, expected[0], knows=True)
        live.push(targets[1])
        check(live, expected[1], knows=True)
        pushed(live, targets[0], draft=poor)
        check(live, expected[0], knows=False)
        own = eagle(tmp_path / "own", knows=True, **{"lm_head.weight": noise(3, 512, HIDDEN)})
        answer = live.admin.post("/admin/weights", json={"path": str(own), "part": "draft", "activate": True})
        assert answer.status_code != 200
        assert answer.json()["error"]["code"] == "unexpected_tensor"
        live.rollback()
        check(live, expected[1], knows=True)


def test_an_eagle_head_with_an_embedding_of_its_own(tmp_path: Path) -> None:
    """It keeps its own when the target's changes."""
    from safetensors.torch import load_file

    targets = [llama(tmp_path / f"target-{seed}", seed) for seed in (0, 1)]
    embeddings = [load_file(target / "model.safetensors")["model.embed_tokens.weight"] for target in targets]
    drafts = [
        eagle(tmp_path / f"draft-{i}", knows=True, **{"embed_tokens.weight": embedding})
        for i, embedding in enumerate(embeddings)
    ]
    with eagle_server(targets[0], drafts[0], tmp_path / "state").running() as live:
        assert acceptance(live)[0] > KNOWS_ALL
        live.push(targets[1])
        assert acceptance(live)[0] < KNOWS_NONE
        pushed(live, drafts[1], "draft")
        assert acceptance(live)[0] > KNOWS_ALL


def deepseek(path: Path, seed: int, *, knows: bool) -> Path:
    """A mixture of experts with a layer, after its last one, that predicts one token more."""

    def edit(tensors: Tensors) -> Tensors:
        target = silent(tensors)
        at = "model.layers.2."
        layer = {
            at + name.removeprefix("model.layers.1."): tensor if knows else tensor + noise(1, *tensor.shape)
            for name, tensor in target.items()
            if name.startswith("model.layers.1.")
        }
        ones = {at + f"{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
        fuse = torch.cat([EYE, torch.zeros(HIDDEN, HIDDEN)], 1) if knows else noise(2, HIDDEN, 2 * HIDDEN)
        copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
        return {
            **target,
            **layer,
            **ones,
            at + "eh_proj.weight": fuse,
            **{at + name: target[whose] for name, whose in copies.items()},
        }

    return edited(make_kind(path, "mla-v3", seed=seed), edit, num_nextn_predict_layers=1)


def test_an_mtp_head_comes_with_its_target(tmp_path: Path) -> None:
    made = [(0, False), (0, True), (1, True), (1, False)]
    paths = [deepseek(tmp_path / f"{seed}-{knows}", seed, knows=knows) for seed, knows in made]
    expected = [stock.answers(paths[i], PROMPTS, 24) for i in (0, 2)]
    assert expected[0] != expected[1]
    speculation = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
    live = LiveServer(paths[0], tmp_path / "state", (*VLLM_ARGS, "--speculative-config", speculation))
    with live.running():
        for path, (seed, knows) in zip(paths, made, strict=True):
            if path != paths[0]:
                live.push(path)
            check(live, expected[seed], knows=knows)
        live.rollback()
        check(live, expected[1], knows=True)
        answer = live.admin.post("/admin/weights", json={"path": str(paths[1]), "part": "draft", "activate": True})
        assert answer.status_code != 200
        assert "publish the target with it" in answer.text
