"""Text to ids and back, against the ids that llama.cpp gives."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from runtime.errors import InvalidRequest, ModelFileError
from runtime.tokenizer.load import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from runtime.tokenizer.vocabulary import GgufVocabulary
from tests.support.smollm2 import open_smollm2
from tests.support.tiny_checkpoints import CONTROL_TOKENS, MERGES, TOKENS, write_tiny_folder

SAMPLES = json.loads((Path(__file__).parent / "samples" / "tokenizer.json").read_text("utf-8"))
OTHER_PRES = ("gpt-2", "default", "llama-bpe", "qwen2")


def tiny_vocabulary(**changes: Any) -> GgufVocabulary:
    """Return the vocabulary of the tiny models, with changes."""
    types = [3] * len(CONTROL_TOKENS) + [1] * (len(TOKENS) - len(CONTROL_TOKENS))
    vocabulary = GgufVocabulary(
        model="gpt2",
        pre="smollm",
        tokens=list(TOKENS),
        token_types=types,
        merges=list(MERGES),
        bos_id=1,
        eos_id=2,
        other_eos_ids=frozenset(),
        add_bos=None,
        vocab_size=len(TOKENS),
    )
    return msgspec.structs.replace(vocabulary, **changes)


def tiny_tokenizer(**changes: Any) -> Tokenizer:
    return tokenizer_from_gguf(tiny_vocabulary(**changes), where="tiny.gguf")


@functools.cache
def plain_tiny_tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return open_smollm2().tokenizer()


def differences(encode: Callable[[str], list[int]], wanted: str) -> list[str]:
    """Return the sample texts that have ids under `wanted` but get others."""
    samples = [sample for sample in SAMPLES["samples"] if wanted in sample]
    assert samples
    return [ascii(s["text"]) for s in samples if encode(s["text"]) != s[wanted]]


def test_every_sample_gets_the_ids_of_llama_cpp(smollm2: Tokenizer) -> None:
    assert len(SAMPLES["samples"]) >= 300
    assert differences(smollm2.encode, "ids") == []


def test_control_tokens_are_parsed_where_asked_for(smollm2: Tokenizer) -> None:
    found = differences(lambda text: smollm2.encode(text, parse_special=True), "special_ids")
    assert found == []


def test_parsing_control_tokens_changes_no_other_text(smollm2: Tokenizer) -> None:
    for sample in SAMPLES["samples"]:
        if "special_ids" not in sample:
            assert smollm2.encode(sample["text"], parse_special=True) == sample["ids"]


def test_every_sample_is_decoded_to_the_text_of_llama_cpp(smollm2: Tokenizer) -> None:
    for sample in SAMPLES["samples"]:
        assert smollm2.decode(sample["ids"]) == sample.get("decoded", sample["text"])


def test_ids_cut_within_a_character_are_decoded_as_llama_cpp_does(smollm2: Tokenizer) -> None:
    assert len(SAMPLES["cut"]) >= 300
    for cut in SAMPLES["cut"]:
        assert smollm2.decode(cut["ids"], skip_special=False) == cut["text"], cut


@pytest.mark.parametrize("pre", OTHER_PRES)
def test_every_other_way_to_cut_text_is_that_of_llama_cpp(pre: str) -> None:
    vocabulary = msgspec.structs.replace(open_smollm2().vocabulary(), pre=pre)
    assert differences(tokenizer_from_gguf(vocabulary, where="smollm2").encode, pre) == []


def test_the_real_tokenizer_is_what_its_file_says(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_id, smollm2.eos_id, smollm2.eos_ids) == (1, 2, {0, 2})
    assert not smollm2.add_bos
    assert len(smollm2.special_tokens) == 17
    assert smollm2.special_tokens["<|im_start|>"] == 1
    assert not smollm2.drops_first_space


def test_control_tokens_show_only_where_asked_for(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>hi<|im_end|>", parse_special=True)
    assert smollm2.decode(ids) == "hi"
    assert smollm2.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize("text", ["\ud800", "a\udfff b", "x" * 1000 + "\udc00"])
@pytest.mark.parametrize("parse_special", [False, True])
def test_half_a_surrogate_pair_is_the_callers_mistake(
    text: str, parse_special: bool, smollm2: Tokenizer
) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        smollm2.encode(text, parse_special=parse_special)


@pytest.mark.parametrize("ids", [[-1], [49152], [5, 10**6, 7], [5, -3]])
def test_an_id_outside_of_the_vocabulary_is_the_callers_mistake(
    ids: list[int], smollm2: Tokenizer
) -> None:
    with pytest.raises(InvalidRequest, match=r"ids 0 to 49151"):
        smollm2.decode(ids)


def test_nothing_is_nothing(smollm2: Tokenizer) -> None:
    assert smollm2.encode("") == []
    assert smollm2.encode("", parse_special=True) == []
    assert smollm2.decode([]) == ""


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_any_text_survives_a_round_trip(text: str) -> None:
    tokenizer = plain_tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


SPECIAL_TEXTS = st.lists(st.sampled_from([*CONTROL_TOKENS, "<|", "|>", "im_end", " ", "é", "1"]))


@settings(max_examples=200, deadline=None)
@given(SPECIAL_TEXTS.map("".join))
def test_control_tokens_cut_text_where_they_stand(text: str) -> None:
    tokenizer = plain_tiny_tokenizer()
    ids = tokenizer.encode(text, parse_special=True)
    assert tokenizer.decode(ids, skip_special=False) == text
    special = set(tokenizer.special_tokens.values())
    assert sum(i in special for i in ids) == sum(text.count(token) for token in CONTROL_TOKENS)
    assert not special & set(tokenizer.encode(text))


def test_tokens_that_a_user_defined_are_found_in_plain_text() -> None:
    tokens = [*TOKENS, "<think>", "a b"]
    types = [3, 3, 3] + [1] * (len(TOKENS) - 3) + [4, 4]
    tokenizer = tiny_tokenizer(tokens=tokens, token_types=types, vocab_size=len(tokens))
    ids = tokenizer.encode("x<think>a b<|im_end|>")
    assert tokenizer.vocab_size == len(tokens)
    assert ids[1:3] == [len(TOKENS), len(TOKENS) + 1]
    assert 2 not in ids
    assert tokenizer.decode(ids) == "x<think>a b<|im_end|>"


def test_the_longest_control_token_counts() -> None:
    tokens = [*TOKENS, "<|im_end|>>"]
    types = [3, 3, 3] + [1] * (len(TOKENS) - 3) + [3]
    tokenizer = tiny_tokenizer(tokens=tokens, token_types=types, vocab_size=len(tokens))
    assert tokenizer.encode("<|im_end|>>", parse_special=True) == [len(TOKENS)]


def test_ids_beyond_the_tokens_have_no_text() -> None:
    tokenizer = tiny_tokenizer(vocab_size=len(TOKENS) + 10)
    assert tokenizer.vocab_size == len(TOKENS) + 10
    assert tokenizer.decode([5, len(TOKENS) + 9, 5]) == tokenizer.decode([5, 5])


def test_llama_files_that_do_not_say_begin_with_a_bos() -> None:
    assert tiny_tokenizer(pre="llama-bpe").add_bos
    assert not tiny_tokenizer(pre="llama-bpe", add_bos=False).add_bos
    assert not tiny_tokenizer(pre="smollm").add_bos
    assert not tiny_tokenizer(pre="smollm", add_bos=True, bos_id=None).add_bos


def test_a_vocabulary_without_control_tokens_has_none_to_find() -> None:
    tokenizer = tiny_tokenizer(token_types=[1] * len(TOKENS))
    assert dict(tokenizer.special_tokens) == {}
    assert tokenizer.encode("<|im_end|>", parse_special=True) == tokenizer.encode("<|im_end|>")


def test_control_tokens_cannot_be_changed_from_outside() -> None:
    with pytest.raises(TypeError):
        tiny_tokenizer().special_tokens["x"] = 1  # type: ignore[index]


# --- Hugging Face's tokenizer.json ---------------------------------------------------------------


def spaced_tokenizer(**metaspace: Any) -> tokenizers.Tokenizer:
    """Return a SentencePiece-like tokenizer, as Llama 2's, or with Metaspace where given."""
    letters = [chr(c) for c in range(0x21, 0x7F)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *letters]
    tokens += ["he", "▁he"]
    bpe = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[("h", "e"), ("▁", "he")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(bpe)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", **metaspace)
        steps[0] = decoders.Metaspace("▁", **metaspace)
        steps.pop()
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def folder_with(tokenizer: tokenizers.Tokenizer, folder: Path) -> Path:
    write_tiny_folder(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


TEXTS = ("he he", " he", "  two", "é 漢 😀", "a\nb\tc", "", " ")


def test_a_sentencepiece_like_folder_agrees_with_its_library(tmp_path: Path) -> None:
    theirs = spaced_tokenizer()
    ours = tokenizer_from_folder(folder_with(theirs, tmp_path), vocab_size=400)
    assert (ours.bos_id, ours.eos_ids, ours.add_bos) == (1, {2, 0}, True)
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode_prompt(text) == ids
        assert ours.decode(ids) == theirs.decode(ids) == text
        whole = f"<s>{text}</s>{text}"
        assert ours.encode(whole, parse_special=True) == (
            theirs.encode(whole, add_special_tokens=False).ids
        )


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_space_is_put_in_front_only_where_the_folder_says(scheme: str, tmp_path: Path) -> None:
    theirs = spaced_tokenizer(prepend_scheme=scheme, split=False)
    ours = tokenizer_from_folder(folder_with(theirs, tmp_path), vocab_size=400)
    for text in ("he", "he</s>he", "<s>he<s> he", "</s></s>he"):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, parse_special=True) == ids, text
    ids = ours.encode("he he")
    assert ours.decode(ids) == theirs.decode(ids) == "he he"


def test_white_space_that_a_control_token_takes_with_it(tmp_path: Path) -> None:
    theirs = spaced_tokenizer(prepend_scheme="never", split=False)
    theirs.add_special_tokens([tokenizers.AddedToken("<pad>", lstrip=True, rstrip=True)])
    ours = tokenizer_from_folder(folder_with(theirs, tmp_path), vocab_size=400)
    text = "he \n<pad>  he"
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, parse_special=True) == ids


def test_padding_and_truncation_of_the_file_are_not_applied(tmp_path: Path) -> None:
    theirs = spaced_tokenizer()
    theirs.enable_padding(length=50)
    theirs.enable_truncation(2)
    ours = tokenizer_from_folder(folder_with(theirs, tmp_path), vocab_size=400)
    assert ours.decode(ours.encode("hello there")) == "hello there"


def test_a_decoder_that_is_not_known_is_refused(tmp_path: Path) -> None:
    theirs = spaced_tokenizer()
    theirs.decoder = decoders.WordPiece()
    with pytest.raises(ModelFileError, match="WordPiece"):
        tokenizer_from_folder(folder_with(theirs, tmp_path), vocab_size=400)
