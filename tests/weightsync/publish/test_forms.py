"""Versions with other tensors than those before, and the configuration that they take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.weightsync.codes import refused
from tests.weightsync.tensors import model
from weightsync import Publisher
from weightsync.control.forms import GENERATION, TEMPLATE
from weightsync.control.records import FormRecord, Keys
from weightsync.format.manifest import Schema, schema_of

CONFIG = {"model_type": "llama", "vocab_size": 16, "tie_word_embeddings": True}
UNTIED = CONFIG | {"tie_word_embeddings": False}
HEAD = {"lm_head.weight": np.ones((4, 8), np.float32)}


def forms(publisher: Publisher) -> list[str]:
    return [v.form for v in publisher.versions() if v.state == "ready"]


def form_of(publisher: Publisher, digest: str) -> FormRecord:
    found = publisher._store.get(Keys(publisher.model).form(digest))
    assert found is not None
    return FormRecord.from_json(found.value)


def test_other_tensors_take_a_configuration(publisher: Publisher) -> None:
    publisher.publish(model(), activate=False)
    with refused("unexpected_tensor", match="config"):
        publisher.publish(model() | HEAD, activate=False)
    version = publisher.publish(model() | HEAD, config=UNTIED, wait=False)
    assert forms(publisher)[0] == ""
    record = form_of(publisher, forms(publisher)[1])
    assert Schema.from_json(record.tensors.encode()).tensors.keys() == (model() | HEAD).keys()
    assert '"tie_word_embeddings": false' in record.config
    assert publisher.versions()[-1].version == version


def test_what_follows_has_the_form_of_what_it_follows(publisher: Publisher) -> None:
    """A trainer sends no configuration; nor does that of a checkpoint which was saved elsewhere make another form."""
    publisher.publish(model(), config=CONFIG, wait=False)
    publisher.publish(model(1), activate=False)
    publisher.publish(model(2), config=CONFIG | {"_name_or_path": "x", "torch_dtype": "float32"}, activate=False)
    assert len(set(forms(publisher))) == 1
    publisher.publish(model() | HEAD, config=UNTIED, wait=False)
    assert publisher.schema().tensors.keys() == (model() | HEAD).keys()  # type: ignore[union-attr]
    publisher.publish(model(3) | HEAD, activate=False)
    with pytest.raises(Exception, match="missing"):
        publisher.publish(model(4), activate=False)
    publisher.publish(model(4), config=CONFIG, activate=False)
    first, *_, other, following, back = forms(publisher)
    assert (other == following, first == back, first == other) == (True, True, False)


def test_another_configuration_of_the_same_tensors_is_another_form(publisher: Publisher) -> None:
    """Computed with another rope_theta they would be another model under a fingerprint that is right."""
    publisher.publish(model(), config=CONFIG | {"rope_theta": 1e4}, wait=False)
    publisher.publish(model(1), config=CONFIG | {"rope_theta": 1e6}, wait=False)
    publisher.publish(model(2), activate=False)
    first, other, following = forms(publisher)
    assert (other == following, first == other) == (True, False)
    assert json.loads(form_of(publisher, other).config)["rope_theta"] == 1e6
    with refused("config_mismatch", match="eos_token_id"):
        publisher.publish(model(3), config=CONFIG | {"rope_theta": 1e6, "eos_token_id": 7}, activate=False)
    assert len(publisher.versions()) == 3


def test_a_version_without_a_configuration_has_that_of_the_instances(publisher: Publisher) -> None:
    """So what follows it is another form where its own is another."""
    own = CONFIG | {"rope_theta": 1e4, GENERATION: {"eos_token_id": 2}}
    publisher._store.put(Keys(publisher.model).config, json.dumps(own).encode())
    publisher.publish(model(), wait=False)
    publisher.publish(model(1), config=CONFIG | {"rope_theta": 1e4}, wait=False)
    publisher.publish(model(2), config=CONFIG | {"rope_theta": 1e6}, wait=False)
    publisher.publish(model(3), config=own | {TEMPLATE: "a", "rope_theta": 1e6}, wait=False)
    first, same, other, template = publisher.versions()
    assert (first.form, same.form) == ("", "")
    assert len({first.form, other.form, template.form}) == 3
    assert json.loads(form_of(publisher, other.form).config)[GENERATION] == {"eos_token_id": 2}
    assert publisher.kept_files(same, json.dumps(CONFIG)) == ["generation_config.json"]
    with refused("config_mismatch", match="vocab_size"):
        publisher.publish(model(3), config=own | {"vocab_size": 32}, onto=1, activate=False)


def test_a_configuration_that_no_instance_has_told_is_none_that_is_dropped(publisher: Publisher) -> None:
    publisher.publish(model(), wait=False)
    publisher.publish(model(1), config=CONFIG, wait=False)
    publisher.publish(model(2), config=CONFIG, wait=False)
    first, other, following = forms(publisher)
    assert (first, other == following) == ("", True)
    assert json.loads(form_of(publisher, other).config) == CONFIG


def test_a_configuration_that_cannot_be_compared_is_never_the_first(publisher: Publisher) -> None:
    with refused("config_mismatch", match="not a JSON object"):
        publisher.begin_all({"": (schema_of([("x", "float32", [1])]), {})}, config="[]")
    assert not publisher.versions()


def test_a_version_built_onto_an_older_one_has_its_form(publisher: Publisher) -> None:
    first = publisher.publish(model(), config=CONFIG, wait=False)
    publisher.publish(model() | HEAD, config=UNTIED, wait=False)
    publisher.publish(model(1), onto=first, activate=False)
    found = forms(publisher)
    assert found[0] == found[2] != found[1]


def test_a_generator_of_other_tensors_is_taken(publisher: Publisher) -> None:
    def named() -> Iterator[tuple[str, Any]]:
        yield from (model() | HEAD).items()

    publisher.publish(model(), config=CONFIG, wait=False)
    publisher.publish(named(), config=UNTIED, activate=False)
    assert publisher.versions()[-1].tensors == len(model()) + 1
