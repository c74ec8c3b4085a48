"""Logs of requests as programs write them: clean ones, and ones with one planted prefix breaker.

Owns: the programs, and what each breaker does to a body as it is sent.  Does not know: how one is
found.
Idea: every breaker is a function from the clean body of a request to the one that is sent, so a log
differs from a clean one in nothing else.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable
from typing import Any

from tests.support.chat_programs import WORDS, Body, Breaker, Program, Sent, paragraph, sentence


def _above(text: Callable[[random.Random, Sent], str]) -> Breaker:
    """A breaker that writes a text above the rules of the system prompt."""

    def breaker(rng: random.Random, sent: Sent) -> Body:
        system = sent.body["messages"][0]
        first, _, rest = system["content"].partition("\n")
        system["content"] = f"{first}\n{text(rng, sent)}\n{rest}"
        return sent.body

    return breaker


def _clock(rng: random.Random, sent: Sent) -> str:
    return f"Current time: {rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}"


def _date(rng: random.Random, sent: Sent) -> str:
    month = rng.choice(["January", "March", "June", "October"])
    return f"Today is {rng.randrange(1, 29)} {month} {rng.randrange(2000, 2030)}."


def _git(rng: random.Random, sent: Sent) -> str:
    files = "\n".join(f"  modified: src/{rng.choice(WORDS)}.py" for _ in range(3))
    return f"git status:\nOn branch {rng.choice(WORDS)}-{rng.randrange(999)}\n{files}"


def _name(rng: random.Random, sent: Sent) -> str:
    return f"You are talking to {rng.choice(WORDS).title()} {rng.choice(WORDS).title()}."


def _hex(rng: random.Random, length: int) -> str:
    return f"{rng.getrandbits(4 * length):0{length}x}"


def _documents(rng: random.Random, sent: Sent) -> str:
    return "Documents:\n" + "\n".join(f"* {sentence(rng)}" for _ in range(8))


def _edited(rng: random.Random, sent: Sent) -> Body:
    system = sent.body["messages"][0]
    word = rng.choice(WORDS)
    system["content"] = system["content"].replace("an assistant", f"an {word} assistant")
    return sent.body


def _examples_shuffled(rng: random.Random, sent: Sent) -> Body:
    system = sent.body["messages"][0]
    rules = system["content"].split("\n")
    blocks = [f"Example: {rule}\nReply: {rule[::-1]}" for rule in rules[1:]]
    rng.shuffle(blocks)
    system["content"] = "\n\n".join([rules[0], *blocks])
    return sent.body


def _turns_shuffled(rng: random.Random, sent: Sent) -> Body:
    messages = sent.body["messages"]
    pairs = [messages[i : i + 2] for i in range(1, 9, 2)]
    rng.shuffle(pairs)
    messages[1:9] = [message for pair in pairs for message in pair]
    return sent.body


def _shuffled_keys(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: _shuffled_keys(rng, value[key]) for key in keys}
    return [_shuffled_keys(rng, item) for item in value] if isinstance(value, list) else value


def _json_keys(rng: random.Random, sent: Sent) -> Body:
    shop = {word: {"stock": len(word), "price": 7 * len(word)} for word in WORDS[:12]}
    system = sent.body["messages"][0]
    system["content"] = f"Stock: {json.dumps(_shuffled_keys(rng, shop))}\n{system['content']}"
    return sent.body


def _tool_order(rng: random.Random, sent: Sent) -> Body:
    rng.shuffle(sent.body["tools"])
    return sent.body


def _tool_keys(rng: random.Random, sent: Sent) -> Body:
    sent.body["tools"] = _shuffled_keys(rng, sent.body["tools"])
    return sent.body


def _tool_text(rng: random.Random, sent: Sent) -> Body:
    function = sent.body["tools"][0]["function"]
    function["description"] = f"Now offers {paragraph(rng, length=2)} {function['description']}"
    return sent.body


def _tools_come_and_go(rng: random.Random, sent: Sent) -> Body:
    sent.body["tools"] = [tool for tool in sent.body["tools"] if rng.random() < 0.6]
    if not sent.body["tools"]:
        del sent.body["tools"]
    return sent.body


def _trimmed(rng: random.Random, sent: Sent) -> Body:
    messages = sent.body["messages"]
    sent.body["messages"] = [messages[0], *messages[1:][-5:]]
    return sent.body


def _cleared(rng: random.Random, sent: Sent) -> Body:
    for message in sent.body["messages"][1:-3]:
        if message["role"] == "assistant":
            message["content"] = "[old reply cleared]"
    return sent.body


def _reminder(rng: random.Random, sent: Sent) -> Body:
    rules = "Remember: be brief, be kind, never tell what is on the list of things to keep."
    sent.body["messages"].insert(-1, {"role": "user", "content": rules})
    return sent.body


def _thinking(rng: random.Random, sent: Sent) -> Body:
    last = len(sent.body["messages"]) - 2
    for at, message in enumerate(sent.body["messages"]):
        if message["role"] == "assistant" and at == last:
            message["content"] = f"<think>\n{sentence(rng)}\n</think>\n\n{message['content']}"
    return sent.body


def _white_space(rng: random.Random, sent: Sent) -> Body:
    for message in sent.body["messages"][1:-1]:
        words = message["content"].split(" ")
        gaps = [rng.choice([" ", " ", " ", "\n"]) for _ in words]
        message["content"] = "".join(f"{w}{g}" for w, g in zip(words, gaps, strict=True)).strip()
    return sent.body


def _image(url: str) -> Body:
    return {"type": "image_url", "image_url": {"url": url}}


def _image_moves(rng: random.Random, sent: Sent) -> Body:
    system = sent.body["messages"][0]
    parts = [{"type": "text", "text": line + "\n"} for line in system["content"].split("\n")]
    parts.insert(rng.randrange(3), _image("https://shop.example/map.png"))
    system["content"] = parts
    return sent.body


def _image_signed(rng: random.Random, sent: Sent) -> Body:
    system = sent.body["messages"][0]
    image = _image(f"https://shop.example/map.png?sig={_hex(rng, 16)}")
    system["content"] = [image, {"type": "text", "text": system["content"]}]
    return sent.body


def _salted(rng: random.Random, sent: Sent) -> Body:
    return sent.body | {"cache_salt": _hex(rng, 8)}


def _question_above(rng: random.Random, sent: Sent) -> Body:
    rules = sent.body["messages"][0]["content"]
    return {"prompt": f"Question: {paragraph(rng, length=2)}\n{rules}\nAnswer:"}


def _shuffled_above_a_question(rng: random.Random, sent: Sent) -> Body:
    rules = sent.body["messages"][0]["content"].split("\n")[1:]
    shots = [f"Q: {rule}\nA: {rule[::-1]}" for rule in rules]
    rng.shuffle(shots)
    return {"prompt": "\n\n".join([*shots, f"Q: {paragraph(rng, length=2)}\nA:"])}


BREAKERS: dict[str, tuple[Breaker, str]] = {
    "clock": (_above(_clock), "clock"),
    "epoch seconds": (
        _above(lambda rng, sent: f"ts={1_700_000_000 + rng.randrange(10**7)}"),
        "clock",
    ),
    "date": (_above(_date), "date"),
    "iso date": (
        _above(lambda rng, sent: f"Date: 20{rng.randrange(10, 30)}-0{rng.randrange(1, 9)}-17"),
        "date",
    ),
    "uuid": (
        _above(lambda rng, sent: f"Session: {uuid.UUID(int=rng.getrandbits(128), version=4)}"),
        "uuid",
    ),
    "request id": (_above(lambda rng, sent: f"Request id: {_hex(rng, 12)}"), "request_id"),
    "trace": (_above(lambda rng, sent: f"[trace_{_hex(rng, 16)}]"), "request_id"),
    "budget": (
        _above(lambda rng, sent: f"Tokens left in the budget: {rng.randrange(10**6):,}"),
        "number",
    ),
    "cwd": (
        _above(lambda rng, sent: f"Working directory: /home/{rng.choice(WORDS)}/{_hex(rng, 4)}"),
        "directory",
    ),
    "git status": (_above(_git), "git"),
    "user's name": (_above(_name), "caller"),
    "documents above": (_above(_documents), "context_above"),
    "question above": (_question_above, "context_above"),
    "one word edited": (_edited, "prompt_edited"),
    "examples shuffled": (_examples_shuffled, "examples_shuffled"),
    "examples shuffled above a question": (_shuffled_above_a_question, "examples_shuffled"),
    "turns shuffled": (_turns_shuffled, "examples_shuffled"),
    "json keys": (_json_keys, "json_keys"),
    "tool order": (_tool_order, "tool_order"),
    "tool keys": (_tool_keys, "tool_keys"),
    "tool text": (_tool_text, "tool_edited"),
    "tools come and go": (_tools_come_and_go, "tools_changed"),
    "history trimmed": (_trimmed, "history_trimmed"),
    "replies cleared": (_cleared, "history_edited"),
    "reminder moves": (_reminder, "message_moved"),
    "thinking removed": (_thinking, "thinking_removed"),
    "white space": (_white_space, "whitespace"),
    "image moves": (_image_moves, "image_moved"),
    "image signed": (_image_signed, "image_address"),
    "salt of each request": (_salted, "other_salt"),
}
"""Each planted breaker, and the reason by which it must be found."""


def broken_log(*names: str, seed: int) -> list[Body]:
    """Return a log with one planted breaker, or several that hide each other."""
    rng = random.Random(f"{names} {seed}")
    turns = 6 if set(names) & set(LONG) else 4
    program = Program(rng, turns=turns, shots="turns shuffled" in names)

    def broken(rng: random.Random, sent: Sent) -> Body:
        for name in names:
            sent = sent._replace(body=BREAKERS[name][0](rng, sent))
        return sent.body

    return program.lines(broken)


LONG = ("history trimmed", "replies cleared", "reminder moves", "thinking removed")
"""Breakers that show in long conversations only."""
