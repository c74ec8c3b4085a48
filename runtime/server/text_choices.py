"""The choices of a completion: from news to what the client is told, piece by piece or whole.

Owns: echoed prompts, the order of choices, the best of several.  Does not know: HTTP, the envelope.
Idea: both forms are made of the same pieces, so a stream put together is the whole answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from runtime.plan import TokenLogprobs
from runtime.server.answers import TextChoice, TextLogprobs
from runtime.server.generation import News
from runtime.server.logprobs import TextLogprobWriter, joined
from runtime.tokenizer.load import Tokenizer


class TextForm(msgspec.Struct, frozen=True, kw_only=True):
    """How the choices of a completion are told.

    num_choices    choices of each prompt
    num_branches   branches that they are chosen from
    num_top        alternatives told at each place; None tells no log-probabilities
    with_ids       whether token ids are told
    echoes         whether a choice begins with its prompt
    parse_special  whether control tokens show in a prompt's text
    """

    num_choices: int = 1
    num_branches: int = 1
    num_top: int | None = None
    with_ids: bool = False
    echoes: bool = False
    parse_special: bool = False


class _Prompt:
    """A prompt, and what came of its own log-probabilities.

    told  them as the client sees them, the same in every branch
    """

    def __init__(self, text: str, ids: Sequence[int]) -> None:
        self.text = text
        self.ids = ids
        self.logprobs: list[TokenLogprobs | None] = [None]  # nothing stands before the first token
        self.told: TextLogprobs | None = None


class _Branch:
    """One branch: what of it was told, and how likely it was."""

    def __init__(self, prompt: _Prompt, form: TextForm, tokenizer: Tokenizer) -> None:
        self.prompt = prompt
        self.has_begun = False
        self.writer = None
        if form.num_top is not None:
            self.writer = TextLogprobWriter(tokenizer, form.num_top)
        self.pieces: list[TextChoice] = []
        self.num_tokens = 0
        self.logprob_sum = 0.0

    @property
    def mean_logprob(self) -> float:
        """Of the tokens generated; 0 for none."""
        return self.logprob_sum / self.num_tokens if self.num_tokens else 0.0


class TextChoices:
    """The choices of one completion request, by place: prompt by prompt, branch by branch.

    prompts  text and ids of each
    """

    def __init__(
        self, form: TextForm, prompts: Sequence[tuple[str, Sequence[int]]], tokenizer: Tokenizer
    ) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._branches = [
            _Branch(prompt, form, tokenizer)
            for prompt in [_Prompt(text, ids) for text, ids in prompts]
            for _ in range(form.num_branches)
        ]

    def opening(self) -> list[TextChoice]:
        """What a stream begins with: nothing."""
        return []

    def pieces(self, news: News) -> list[TextChoice]:
        """Return what a piece of news tells the client: one choice, or none."""
        place, output = news.place, news.output
        branch, form = self._branches[place], self._form
        if output.prompt_logprobs:
            branch.prompt.logprobs += output.prompt_logprobs
        if not (output.text or output.token_ids or output.finish_reason):
            return []
        text, told = output.text, []
        if not branch.has_begun and form.echoes:
            text = branch.prompt.text + text
            told += self._echoed(branch)
        if branch.writer is not None and output.token_ids:
            told.append(branch.writer.write(output.token_ids, output.logprobs))
        shows_prompt = form.with_ids and not branch.has_begun
        branch.has_begun = True
        if not (text or told or form.with_ids or output.finish_reason):
            return []  # held back: an incomplete character, or what may become a stop
        return [
            TextChoice(
                index=place,
                text=text,
                finish_reason=output.finish_reason,
                logprobs=joined(told) if told else None,
                token_ids=output.token_ids if form.with_ids else msgspec.UNSET,
                prompt_token_ids=branch.prompt.ids if shows_prompt else msgspec.UNSET,
            )
        ]

    def add(self, news: News) -> None:
        """Take a piece of news for the whole answer."""
        branch = self._branches[news.place]
        branch.num_tokens += len(news.output.token_ids)
        branch.logprob_sum += sum(found.token for found in news.output.logprobs)
        branch.pieces += self.pieces(news)

    def whole(self) -> list[TextChoice]:
        """Return the choices, of each prompt the best where there are more than asked for."""
        return [self._put_together(branch, index) for index, branch in enumerate(self._chosen())]

    def _chosen(self) -> Iterator[_Branch]:
        width, count = self._form.num_branches, self._form.num_choices
        for first in range(0, len(self._branches), width):
            of_prompt = self._branches[first : first + width]
            if count < width:
                of_prompt = sorted(of_prompt, key=lambda branch: -branch.mean_logprob)[:count]
            yield from of_prompt

    def _put_together(self, branch: _Branch, index: int) -> TextChoice:
        pieces = branch.pieces
        logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        ids = [i for piece in pieces if piece.token_ids for i in piece.token_ids]
        with_ids = self._form.with_ids
        return TextChoice(
            index=index,
            text="".join(piece.text for piece in pieces),
            finish_reason=pieces[-1].finish_reason,
            logprobs=joined(logprobs) if branch.writer is not None else None,
            token_ids=ids if with_ids else msgspec.UNSET,
            prompt_token_ids=branch.prompt.ids if with_ids else msgspec.UNSET,
        )

    def _echoed(self, branch: _Branch) -> list[TextLogprobs]:
        """The log-probabilities of a prompt that is echoed; the output's go on behind its text."""
        prompt, num_top = branch.prompt, self._form.num_top
        if branch.writer is None or num_top is None:
            return []
        branch.writer.offset = len(prompt.text)
        if prompt.told is None:
            specials = self._form.parse_special
            writer = TextLogprobWriter(self._tokenizer, num_top, specials=specials)
            prompt.told = writer.write(prompt.ids, prompt.logprobs)
        return [prompt.told]
