"""An agent that asks several tools at once: a branch for each call, some abandoned, others joined.

    python examples/agent_tree.py

The conversation up to the tool calls is computed once; every branch begins from there.
"""

from __future__ import annotations

import argparse

from runtime import LLM, Completion, SamplingParams

SYSTEM = (
    "You are a travel agent. You plan weekends with the help of tools: a weather service, a list "
    "of museums and their hours, and a flight search. You answer in one or two short sentences, "
    "you name days and prices where you know them, and you never make up what a tool did not say."
)
TASK = "Plan a weekend in Rome for two people who like art and dislike rain."


def run_tool(name: str) -> str | None:
    """Ask a tool; None where it fails.  Yours would call something."""
    answers = {
        "weather": "Saturday 24 degrees and sun, Sunday rain from noon on",
        "museums": "The Borghese Gallery is open on Saturday from 9 to 19, closed on Sunday",
    }
    return answers.get(name)


class Savings:
    """Adds up what the cache saved."""

    def __init__(self) -> None:
        self.prompt, self.cached = 0, 0

    def note(self, name: str, done: Completion) -> str:
        """Print one answer and what its prompt cost; return its text."""
        usage = done.usage
        self.prompt += usage.prompt_tokens
        self.cached += usage.cached_tokens
        print(f"[{name}] {done.text.strip()}")
        print(f"    {usage.cached_tokens} tokens cached, {usage.computed_tokens} computed")
        return done.text


def main() -> None:
    """Plan, call tools on branches, join what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--max-tokens", type=int, default=40)
    args = parser.parse_args()
    llm, sampling, savings = LLM(args.model), SamplingParams(max_tokens=args.max_tokens), Savings()

    begin = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    with llm.session(begin) as trunk:
        savings.note("plan", trunk.generate(sampling))
        trunk.hold(120)  # the tools may take their time; nothing of the plan is evicted meanwhile
        branches = {name: trunk.fork() for name in ("weather", "museums", "flights")}
        findings = []
        for name, branch in branches.items():
            with branch:  # closed at the end, whatever becomes of it
                result = run_tool(name)
                if result is None:
                    print(f"[{name}] failed: its branch is abandoned")
                    continue
                said = f"The tool '{name}' says: {result}. What follows for the plan?"
                branch.append([{"role": "user", "content": said}])
                findings.append(savings.note(name, branch.generate(sampling)))
        joined = "My tools found this:\n" + "\n".join(findings) + "\nNow give me the final plan."
        trunk.append([{"role": "user", "content": joined}])
        savings.note("answer", trunk.generate(sampling))

    computed = savings.prompt - savings.cached
    print(f"{savings.prompt} prompt tokens: {savings.cached} cached, {computed} computed")


if __name__ == "__main__":
    main()
