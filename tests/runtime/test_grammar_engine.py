"""Grammars in the engine: forks, company and preemption change nothing, and the end is the end."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import jsonschema_rs

from runtime.grammar import Grammar, choice_grammar
from runtime.loading import Runtime
from runtime.request import Request, SamplingParams, pack_prompt
from tests.support.served import quick_runtime

SCHEMA = {
    "type": "object",
    "properties": {"ids": {"type": "array", "items": {"type": "integer"}, "minItems": 12}},
    "required": ["ids"],
    "additionalProperties": False,
}


def run(runtime: Runtime, grammar: Grammar, *, num: int, n: int = 1) -> dict[str, str]:
    """Run so many requests at once; return text and reason of every branch."""
    engine = runtime.engine
    for i in range(num):
        request = Request(
            request_id=str(i),
            prompt=pack_prompt(runtime.tokenizer.encode(f"Request {i}: {'word ' * 40}")),
            sampling=SamplingParams(max_tokens=120, seed=i, n=n),
            constraint=runtime.constrain(grammar),
        )
        engine.submit(request)
    texts: dict[str, str] = defaultdict(str)
    while engine.has_work:
        for output in engine.step():
            texts[f"{output.request_id}/{output.index}"] += output.text
            if output.finish_reason:
                texts[f"{output.request_id}/{output.index}"] += f"|{output.finish_reason}"
    engine.check()
    return dict(texts)


def test_preemption_and_company_change_nothing_of_a_constrained_output() -> None:
    grammar = Grammar(kind="json_schema", source=json.dumps(SCHEMA))
    roomy, tight = quick_runtime(num_blocks=256), quick_runtime(num_blocks=16)
    texts = run(roomy, grammar, num=4)
    assert run(tight, grammar, num=4) == texts
    assert roomy.engine.stats().preemptions == 0
    assert tight.engine.stats().preemptions > 0
    for text in texts.values():
        body, _, reason = text.rpartition("|")
        if reason == "stop":
            assert jsonschema_rs.is_valid(SCHEMA, json.loads(body))


def test_branches_follow_the_grammar_each_on_its_own() -> None:
    choices = ["red", "green, or so", "blue"]
    texts = run(quick_runtime(), choice_grammar(choices), num=2, n=4)
    assert len(texts) == 8
    assert set(texts.values()) <= {f"{choice}|stop" for choice in choices}


def test_what_can_only_end_ends_at_once() -> None:
    outputs: list[Any] = []
    runtime = quick_runtime()
    prompt = pack_prompt(runtime.tokenizer.encode("Say a"))
    constraint = runtime.constrain(choice_grammar(["a"]))
    sampling = SamplingParams(max_tokens=9)
    request = Request(request_id="a", prompt=prompt, sampling=sampling, constraint=constraint)
    runtime.engine.submit(request)
    while runtime.engine.has_work:
        outputs += runtime.engine.step()
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].usage.completion_tokens == 1
