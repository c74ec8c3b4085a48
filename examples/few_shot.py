"""Few-shot classification: many inputs behind one template, each label scored, none generated.

    python examples/few_shot.py

The template is computed once and held; each input then costs its own tokens and those of the
labels.
"""

from __future__ import annotations

import argparse
import time

from runtime import LLM

TEMPLATE = """Is the review positive or negative?

Review: The food was cold and the waiter was rude.
Answer: negative

Review: A wonderful evening, we will come back soon.
Answer: positive

Review: It broke after two days and nobody answered my letters.
Answer: negative

Review: Exactly what I was looking for, and it arrived early.
Answer: positive

Review: The plot makes no sense and the actors look bored.
Answer: negative

Review: I laughed from the first page to the last.
Answer: positive
"""
LABELS = ["positive", "negative"]
REVIEWS = [
    "I loved every minute of it.",
    "A waste of time and money.",
    "The staff were kind and the room was spotless.",
    "The sound is terrible and the screen flickers.",
    "Best soup that I have had in years.",
    "It was late, it was wet, and half of it was missing.",
]


def main() -> None:
    """Classify the reviews, and say what the cache saved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--reviews", type=int, default=len(REVIEWS), help="how many of them")
    args = parser.parse_args()
    llm = LLM(args.model)

    began = time.perf_counter()
    with llm.session(TEMPLATE) as template:
        labels = [f" {label}" for label in LABELS]
        usages = [choice.usage for choice in template.score(labels).choices]  # held from here on
        print(f"template: {time.perf_counter() - began:.2f} s, {template.state.held_tokens} held")
        for review in REVIEWS[: args.reviews]:
            began = time.perf_counter()
            with template.fork() as branch:
                branch.append(f"\nReview: {review}\nAnswer:")
                scores = branch.score(labels)
            one, other = scores.choices
            usages += [one.usage, other.usage]
            print(
                f"{LABELS[scores.best]:9} (by {abs(one.logprob - other.logprob):.2f}, "
                f"{time.perf_counter() - began:.2f} s, {one.usage.cached_tokens} of "
                f"{one.usage.prompt_tokens} tokens cached)  {review}"
            )
    prompt = sum(usage.prompt_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    print(f"{prompt} prompt tokens: {cached} cached, {prompt - cached} computed")


if __name__ == "__main__":
    main()
