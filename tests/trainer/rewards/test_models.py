"""Mathematical answers, a classifier's opinion, a judge's rating."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from safetensors.torch import load_file

from tests.trainer.rollouts.generate_server import serve_app
from trainer.config import ClassifierReward, GatewayConfig, JudgeReward, MathReward, RegexReward, RewardConfig
from trainer.errors import ConfigError
from trainer.plan.report import file_bytes
from trainer.rewards import RewardRequest, Score, Scorer, build_scorer
from trainer.rewards.models import Classifier, rating_in
from trainer.tiny_model import write_tiny_model


def asked(scorer: Scorer, *pairs: tuple[str, str]) -> list[Score]:
    async def ask() -> list[Score]:
        return await asyncio.gather(*(scorer(RewardRequest("3+4=", answer, expected)) for answer, expected in pairs))

    return asyncio.run(ask())


def scores(config: RewardConfig, *pairs: tuple[str, str], gateway: GatewayConfig | None = None) -> list[Score]:
    with contextlib.closing(build_scorer([config], gateway)) as scorer:
        return asked(scorer, *pairs)


@pytest.fixture(scope="module")
def math() -> Iterator[Scorer]:
    with contextlib.closing(build_scorer([MathReward(workers=1, timeout_s=60.0, deadline_s=300.0)])) as scorer:
        yield scorer


@pytest.fixture(scope="module")
def boxed() -> Iterator[Scorer]:
    """It reads boxes only."""
    config = MathReward(boxed_only=True, workers=1, timeout_s=60.0, deadline_s=300.0)
    with contextlib.closing(build_scorer([config])) as scorer:
        yield scorer


UNBOXED = [("It is $\\frac{1}{2}$.", "0.5"), ("The answer is 42.", "42"), ("$\\{1, 2\\}$", "$\\{2, 1\\}$")]
# How data sets write golds, each with an answer that means the same. A number out of one of these is another answer.
SEVERAL = [
    ("(1, 2)", "(1,2)"),
    ("(15,-29)", "\\left(15, -29\\right)"),
    ("\\left( \\frac{3}{2}, -13 \\right)", "(1.5, -13)"),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)"),
    ("[1, 2)", "[1,2)"),
    ("(-\\infty, 2) \\cup (3, \\infty)", "(-\\infty,2)\\cup(3,\\infty)"),
    ("x \\in [-2,7]", "[-2,7]"),
    ("1,-2", "x=-2 \\text{ or } x=1"),
    ("3, 5, 7", "\\{7, 5, 3\\}"),
    ("\\{1\\pm\\sqrt{5},-2\\}", "\\{-2, 1+\\sqrt{5}, 1-\\sqrt{5}\\}"),
    ("x = 1 or x = 2", "2, 1"),
    ("x > 3 and x < 5", "x>3, x<5"),
    ("x > 3", "3 < x"),
    ("5x - 7y + 11z + 4 = 0", "-5x+7y-11z-4=0"),
    ("y = 2x + 3", "3 + 2x"),
    ("7:30", "7:30"),
    ("2\\frac12", "5/2"),
    ("137 \\frac{1}{2}", "137.5"),
    ("1 1/2", "1\\frac{1}{2}"),
    ("1.23 \\times 10^{5}", "123000"),
    ("e^{16} - 1", "-1 + e^{16}"),
    ("6 - 5i", "-5i+6"),
    ("2*sqrt(3)", "\\sqrt{12}"),
    ("\\frac{20000}{\\pi}", "20000/\\pi"),
    ("8n^2 + 4n + 1", "4n(2n+1)+1"),
    ("\\begin{pmatrix} -1/3 \\\\ 2/3 \\end{pmatrix}", "\\begin{pmatrix} -\\frac13 \\\\ \\frac23 \\end{pmatrix}"),
    ("3 apples and 4 pears", "3 apples and 4 pears"),
    ("$18 and $20", "20, 18"),
    ("2√3", "2√3"),
    ("(-∞, 3]", "(-∞, 3]"),
    ("7\\pi", "7\\pi"),
    ("3R^2", "3 R^2"),
]
SINGLE = [
    ("$3x$", "2x + x"),
    ("$2\\sqrt{2}$", "\\sqrt{8}"),
    ("x=5", "5"),
    ("-3", "-3.0"),
    ("0.5", "\\frac12"),
    ("58,500", "58500"),
    ("10,\\!080", "10{,}080"),
    ("\\$18.90", "18.90"),
    ("$1,234.50", "1234.5"),
    ("50\\%", "50%"),
    ("90^\\circ", "90"),
    ("100°", "100"),
    ("5 €", "5"),
    ("5.4 \\text{ cents}", "5.4"),
    ("15\\mbox{ cm}^2", "15 \\text{ cm}^2"),
    ("18 dollars", "18"),
    ("18 dollars", "18 dollars"),
    ("about 18", "\\$18"),
    ("#### 72", "72"),
    ("Half of 48 is <<48/2=24>>24.\n48+24 = $72.\n#### 72", "72"),
    ("#### 2,125", "2125"),
    ("Hence $x=3$, and the sum is \\boxed{\\frac{7}{2}}.", "3.5"),
    ("\\(\\frac{1}{2}\\)", "0.5"),
    ("\\text{Evelyn}", "Evelyn"),
    ("Evelyn", "\\text{Evelyn}"),
    ("\\text{(B)}", "B"),
    ("yes", "\\text{Yes}"),
]


def test_math_reads_a_gold_whole(math: Scorer, boxed: Scorer) -> None:
    """A right answer is worth 1; a number out of a gold of several is worth 0, in a box and in a sentence."""
    right = [(f"So it is \\boxed{{{answer}}}.", gold) for gold, answer in SEVERAL + SINGLE]
    wrong = [("The answer is 43.", "42"), ("no idea", "7")]
    wrong += [
        (said.format(number), gold)
        for gold, _ in SEVERAL
        for number in re.findall(r"-?\d+(?:\.\d+)?", gold)
        for said in ("So it is \\boxed{{{}}}.", "The answer is {}.")
    ]
    assert len(wrong) > 100
    found = asked(math, *right, *UNBOXED, *wrong)
    assert [s.failures for s in found if s.failures] == []
    values = dict(zip([*right, *UNBOXED, *wrong], (s.total for s in found), strict=True))
    assert [pair for pair in right + UNBOXED if values[pair] != 1.0] == []
    assert [pair for pair in wrong if values[pair] != 0.0] == []
    assert [s.total for s in asked(boxed, *right)] == [1.0] * len(right)


def test_a_math_gold_that_cannot_be_read_whole_is_a_failure(math: Scorer) -> None:
    hours = "2 \\text{ hours } 30 \\text{ minutes}"
    for score in asked(math, *((f"\\boxed{{{said}}}", hours) for said in ("2", "30", hours))):
        assert "is not one expression" in score.failures["math"]


def test_math_reads_only_the_box_where_it_is_told_to(boxed: Scorer) -> None:
    pairs = ("it is 42", "42"), ("\\boxed{42}", "42"), ("it is 42", "#### 42"), ("\\boxed{42}", "#### 42")
    assert [s.total for s in asked(boxed, *pairs)] == [0.0, 1.0, 0.0, 1.0]


def test_math_reads_what_stands_behind_the_thoughts(math: Scorer, boxed: Scorer) -> None:
    """Not the guesses among them, nor those before an earlier end of thoughts."""
    thought = "<think>Maybe $\\boxed{7}$?</think>"
    pairs = (f"{thought}The answer is 4.", "4"), (f"{thought}The answer is 4.", "7"), (thought, "7")
    assert [s.total for s in asked(math, *pairs)] == [1.0, 0.0, 0.0]
    more = (f"{thought}It is 7.", "7"), (f"{thought}\\boxed{{5}}</think>So \\boxed{{4}}.", "4")
    assert [s.total for s in asked(boxed, *more)] == [0.0, 1.0]


@pytest.mark.broad
def test_math_that_no_solver_ends_is_killed() -> None:
    hard = "$9^{9^{9^{9}}}$"
    found = scores(MathReward(workers=1, timeout_s=8.0), (hard, "1"), ("2", "2"))
    assert found[1].total == 1.0
    assert found[0].total == 0.0


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Qwen2ForSequenceClassification

    path = tmp_path_factory.mktemp("classifier")
    write_tiny_model(path, "qwen2", hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    torch.manual_seed(0)  # of the classifier's head
    Qwen2ForSequenceClassification.from_pretrained(path, num_labels=2, pad_token_id=0).save_pretrained(path)
    return path


@pytest.mark.broad
def test_a_classifier_scores_prompt_and_answer(classifier: Path) -> None:
    first, second, again = scores(ClassifierReward(path=str(classifier)), ("07", ""), ("99", ""), ("07", ""))
    assert 0 < first.total < 1
    assert first.total == again.total != second.total
    other = scores(ClassifierReward(path=str(classifier), label=0), ("07", ""))[0]
    assert other.total == pytest.approx(1 - first.total, abs=1e-6)


@pytest.mark.broad
def test_answers_that_wait_are_one_forward_pass(classifier: Path) -> None:
    """Rows of unequal length give what each gives alone."""
    model = Classifier(str(classifier), -1, probability=False, max_tokens=512, batch=8)
    asked: list[dict[str, Any]] = [{"prompt": "07" * n, "answer": "3"} for n in range(1, 9)]
    alone = [model(one) for one in asked]
    assert model.batch == 8
    assert len(set(alone)) == 8
    assert model.many(asked) == pytest.approx(alone, abs=1e-5)
    told = [("07" * n, "3") for n in range(1, 41)]
    together = scores(ClassifierReward(path=str(classifier), batch=8, probability=False), *told)
    one_by_one = scores(ClassifierReward(path=str(classifier), batch=1, probability=False), *told)
    assert [s.total for s in together] == pytest.approx([s.total for s in one_by_one], abs=1e-5)
    assert not any(s.failures for s in together)


def test_a_classifier_without_padding_takes_one_at_a_time(classifier: Path, tmp_path: Path) -> None:
    shutil.copytree(classifier, tmp_path / "unpadded")
    config = tmp_path / "unpadded" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": None}))
    model = Classifier(str(tmp_path / "unpadded"), -1, probability=True, max_tokens=512, batch=8)
    assert model.batch == 1
    assert model.nbytes == pytest.approx(file_bytes(str(classifier)), abs=4096), "what --plan says of it"
    request = {"prompt": "07", "answer": ""}
    assert model(request) == Classifier(str(classifier), -1, probability=True, max_tokens=512)(request)


def test_a_classifier_reads_messages_in_its_own_template(classifier: Path, tmp_path: Path) -> None:
    shutil.copytree(classifier, tmp_path / "own")
    template = "{% for m in messages %}{{ '+' if m.role == 'user' else '=' }}{{ m.content }}{% endfor %}"
    (tmp_path / "own" / "chat_template.jinja").write_text(template)
    own, plain = (
        Classifier(str(path), -1, probability=False, max_tokens=512) for path in (tmp_path / "own", classifier)
    )
    request = {"prompt": "9" * 8, "answer": "5", "messages": [{"role": "user", "content": "2"}]}
    assert own(request) == plain({"prompt": "+2=", "answer": "5"}), "the policy's own rendering is not read"
    assert own({"prompt": "+2=", "answer": "5"}) == own(request), "a text stays a text"
    said = [
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "5"},
    ]
    assert own(request | {"turns": said}) == plain({"prompt": "+2=1+3=", "answer": "5"})


@pytest.mark.broad
def test_models_rest_and_wake(classifier: Path) -> None:
    """Their processes are gone meanwhile; other rewards go on."""
    configs = [ClassifierReward(path=str(classifier), workers=1), RegexReward(pattern="0")]

    def workers() -> int:
        return len(psutil.Process().children(recursive=True))

    with contextlib.closing(build_scorer(configs)) as scorer:
        before, there, held = asked(scorer, ("07", "07")), workers(), scorer.nbytes
        weights = sum(t.nbytes for t in load_file(classifier / "model.safetensors").values())
        assert held == weights
        scorer.rest()
        assert workers() == there - 1
        assert scorer.nbytes == held, "what they will take again"
        scorer.wake()
        assert workers() == there
        assert asked(scorer, ("07", "07")) == before


@pytest.mark.broad
def test_a_classifier_that_cannot_be_loaded_is_named(classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load"):
        build_scorer([ClassifierReward(path=str(tmp_path))])
    with pytest.raises(ConfigError, match="2 labels"):
        build_scorer([ClassifierReward(path=str(classifier), label=5)])


@pytest.fixture(scope="module")
def judge() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Rates by what the answer says; fails where it says so, once or always. Its URL, and what it was asked."""
    app, asked, failures = FastAPI(), list[dict[str, Any]](), [503]

    async def rate(request: Request) -> JSONResponse:
        asked.append(await request.json() | {"key": request.headers.get("authorization")})
        text = asked[-1]["messages"][0]["content"]
        if "[refused]" in text or ("[busy]" in text and failures):
            return JSONResponse({"error": {}}, 400 if "[refused]" in text else failures.pop())
        reply = "none" if "[mute]" in text else "I would say 2/10... no, 7/10" if "[good]" in text else "10"
        return JSONResponse({"choices": [{"message": {"content": reply}}]})

    app.post("/v1/chat/completions")(rate)
    with serve_app(app) as url:
        yield url, asked


def test_a_judge_is_asked_through_the_gateway(
    judge: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, asked = judge
    monkeypatch.setenv("JUDGE_KEY", "secret")
    gateway = GatewayConfig(url=url, api_key_env="JUDGE_KEY")
    pairs = [("[good] {answer}", "07"), ("great", "07"), ("[busy][good]", "07"), ("[mute]", "07"), ("[refused]", "07")]
    found = scores(JudgeReward(model="m"), *pairs, gateway=gateway)
    assert [round(s.total, 6) for s in found] == [0.7, 1.0, 0.7, 0.0, 0.0]
    assert "no number from 0 to 10" in found[3].failures["judge"]
    assert "HTTP 400" in found[4].failures["judge"]
    first = next(body for body in asked if "{answer}" in body["messages"][0]["content"])
    assert first["key"] == "Bearer secret"
    assert first["temperature"] == 0.0
    assert "07" in first["messages"][0]["content"]


@pytest.mark.parametrize(
    ("reply", "rating"),
    [
        ("8", 8.0), ("8/10", 8.0), ("I rate it 7 out of 10.", 7.0), ("85%", 8.5), ("0.8", 0.8), ("**9** / 10", 9.0),
        ("Three of 4 steps hold, 1 does not. Rating: [[6]]", 6.0), ("[[ 7.5 ]] as 2 is wrong", 7.5), ("[[8/10]]", 8.0),
        ('{"score": 6, "steps": 12}', 6.0), ('```json\n{"reason": "1 of 2", "rating": "3"}\n```', 3.0),
        ("**Score:** 4/5, for 3 reasons", 8.0), ("8/10, as step 3 is wrong", 8.0), ("I would say 2... no, 7", 7.0),
        ("10 would be too much: 11", 10.0), ("none", None), ("99", None), ("-1", None), ("Qwen3", None), ("", None),
    ],
)  # fmt: skip
def test_a_judges_rating_is_read_as_judges_write_it(reply: str, rating: float | None) -> None:
    assert rating_in(reply, 0.0, 10.0) == rating


def test_a_judge_needs_a_server() -> None:
    with pytest.raises(ConfigError, match="no gateway"):
        build_scorer([JudgeReward(model="m")])
    down = scores(JudgeReward(model="m", url="http://127.0.0.1:9", timeout_s=1.0), ("x", "y"))[0]
    assert "gave no answer" in down.failures["judge"]
