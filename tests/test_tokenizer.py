"""Encoding and decoding, against llama.cpp's cases and llama.cpp itself."""

from __future__ import annotations

import json
import lzma
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from asyncllm.errors import CorruptCheckpointError, RequestError, UnsupportedModelError
from asyncllm.text.pretokenizers import PRE_TOKENIZERS
from asyncllm.text.spellings import any_of
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.text.vocabulary import BYTE_ALPHABET

VOCABS = Path(__file__).parent / "data" / "vocabs"
NAMES = ("deepseek-llm", "gpt-2", "llama-bpe", "phi-3", "qwen2")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@cache
def packed(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(lzma.decompress((VOCABS / f"{name}.json.xz").read_bytes()))
    return data


@cache
def vocab(name: str) -> Tokenizer:
    return Tokenizer.from_metadata(packed(name)["metadata"], name)


def byte_level(special: dict[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """Metadata of a small byte-level vocabulary: the bytes, a few merges, and special tokens."""
    special = {"<|endoftext|>": CONTROL} if special is None else special
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2", "i m", "e n", "en d"]
    merges += ["< |", "| >", "im _", "im_ end", "u s", "e r", "us er"]
    tokens = [*BYTE_ALPHABET, *(merge.replace(" ", "") for merge in merges), *special]
    types = [NORMAL] * (len(tokens) - len(special)) + list(special.values())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def sentence_piece(special: dict[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """Metadata of a small sentencepiece vocabulary with bytes to fall back on."""
    pieces = {
        "▁": -9, "h": -9, "e": -9, "l": -9, "o": -9, "▁h": -5, "el": -4, "▁hel": -3, "lo": -2,
        "▁hello": -1, "w": -9, "▁w": -6, "▁▁": -7, "世": -9,
    }  # fmt: skip
    special = special or {}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces, *special]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), *special.values()]
    scores = [0.0] * 259 + [float(score) for score in pieces.values()] + [0.0] * len(special)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def spelled(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_bytes(i).decode("utf-8", "backslashreplace") for i in ids]


@pytest.mark.parametrize("name", NAMES)
def test_every_case_of_llama_cpp_gives_its_ids_and_decodes_to_its_text(name: str) -> None:
    tokenizer = vocab(name)
    cases = packed(name)["cases"]
    assert len(cases) == 47
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)
        assert tokenizer.decode(ids) == text


def test_every_pre_tokenizer_compiles_and_loses_no_character() -> None:
    text = "Hello wörld's  12345 ½ 世界! \r\n\n\t¡ <x>='y' Ünïcode e\u0301 🙂\u200d🙂 "
    for name in PRE_TOKENIZERS:
        tokenizer = Tokenizer.from_metadata(byte_level(pre=name))
        assert tokenizer.decode(tokenizer.encode(text)) == text, name


def test_pre_tokenizers_cut_digits_as_their_models_do() -> None:
    def pieces(pre: str, text: str) -> list[str]:
        tokenizer = Tokenizer.from_metadata(byte_level(pre=pre, merges=["1 2", "12 3", "3 4"],
            tokens=[*BYTE_ALPHABET, "12", "123", "34"], token_type=[NORMAL] * 259))  # fmt: skip
        return spelled(tokenizer, tokenizer.encode(text, add_special_tokens=False))

    assert pieces("gpt-2", "1234") == ["123", "4"]
    assert pieces("qwen2", "1234") == ["1", "2", "3", "4"]
    assert pieces("smollm", "1234") == ["1", "2", "3", "4"]
    assert pieces("llama-bpe", "12345") == ["123", "4", "5"]
    assert pieces("gpt-4o", "12345") == ["123", "4", "5"]
    assert pieces("tekken", "12") == ["1", "2"]


def test_an_unknown_pre_tokenizer_is_reported_and_the_default_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = Tokenizer.from_metadata(byte_level(pre="from-the-future"))
    (record,) = caplog.records
    assert "unknown-pre-tokenizer" in record.message and "from-the-future" in record.message
    default = Tokenizer.from_metadata(byte_level(pre="default"))
    assert tokenizer.encode("hello 123!") == default.encode("hello 123!")


def test_sentencepiece_puts_a_space_in_front_and_falls_back_on_bytes() -> None:
    tokenizer = Tokenizer.from_metadata(sentence_piece())
    ids = tokenizer.encode("hello  wé世")
    assert ids[0] == tokenizer.bos_id == 1
    assert spelled(tokenizer, ids[1:]) == [" hello", " ", " w", "\\xc3", "\\xa9", "世"]
    assert tokenizer.decode(ids) == "hello  wé世"
    bare = Tokenizer.from_metadata(sentence_piece(add_space_prefix=False, add_bos_token=False))
    assert spelled(bare, bare.encode("hello")) == ["h", "el", "lo"]
    assert bare.decode(bare.encode(" hello")) == " hello"


def test_sentencepiece_without_all_bytes_uses_the_unknown_token() -> None:
    metadata = sentence_piece()
    types = metadata["tokenizer.ggml.token_type"].copy()
    types[3] = NORMAL
    tokenizer = Tokenizer.from_metadata(metadata | {"tokenizer.ggml.token_type": types})
    ids = tokenizer.encode("hello é", add_special_tokens=False)
    assert ids[-1] == 0 and tokenizer.decode(ids) == "hello "


def test_text_becomes_control_tokens_only_when_asked() -> None:
    special = {"<|im_end|>": CONTROL, "<tool>": USER_DEFINED, "<|im_start|>": USER_DEFINED}
    for metadata in (byte_level(special), sentence_piece(special)):
        tokenizer = Tokenizer.from_metadata(metadata)
        end, tool = tokenizer.vocab_size - 3, tokenizer.vocab_size - 2
        text = "a<|im_end|><tool><s></s><unk>b<|im_start|>"
        ids = tokenizer.encode(text, add_special_tokens=False)
        # A user-defined token is found in any text, but one that opens a turn counts as control.
        assert [i for i in ids if i == tool or tokenizer.is_special(i)] == [tool]
        parsed = tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=True)
        assert {end, tool} < set(parsed) and tokenizer.is_special(parsed[-1])
        for found in (ids, parsed):
            assert tokenizer.decode(found, skip_special_tokens=False).replace(" ", "") == text
        assert "im_end" not in tokenizer.decode(parsed) and "<tool>" in tokenizer.decode(parsed)


def test_a_merge_never_makes_a_control_token() -> None:
    metadata = byte_level({"<|im_end|>": CONTROL})
    metadata["tokenizer.ggml.merges"] += ["<| im_end", "<|im_end |>"]
    metadata["tokenizer.ggml.tokens"].insert(-1, "<|im_end")
    metadata["tokenizer.ggml.token_type"].insert(-1, NORMAL)
    for pre in ("gpt-2", "llama-bpe"):
        tokenizer = Tokenizer.from_metadata(metadata | {"tokenizer.ggml.pre": pre})
        assert tokenizer.vocab_size - 1 not in tokenizer.encode("<|im_end|>")


def test_the_longest_special_token_is_found_first() -> None:
    tokens = ["\n", "\n\n", "\n\n\n", "<a>", "<a><b>"]
    pattern = any_of(tokens)
    assert pattern.findall("\n\n\n\n\n<a><b><a>") == ["\n\n\n", "\n\n", "<a><b>", "<a>"]
    assert any_of(["x" * n for n in range(1, 400)]).findall("x" * 500) == ["x" * 399, "x" * 101]
    assert any_of([]).search("anything") is None


def test_white_space_after_phi_3_special_tokens_is_dropped() -> None:
    tokenizer = vocab("phi-3")
    ids = tokenizer.encode("<|user|> \n hi<|end|>\n\n<s> x", parse_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s><|user|> hi<|end|><s>  x"


def test_there_is_exactly_one_bos_and_eos_where_asked() -> None:
    special = {"<bos>": CONTROL, "<eos>": CONTROL}
    size = len(byte_level(special)["tokenizer.ggml.tokens"])
    keys = {"bos_token_id": size - 2, "eos_token_id": size - 1}
    tokenizer = Tokenizer.from_metadata(
        byte_level(special, add_bos_token=True, add_eos_token=True, **keys)
    )
    for text in ("hi", "<bos>hi"):
        ids = tokenizer.encode(text, parse_special_tokens=True)
        assert ids.count(size - 2) == 1 and ids[0] == size - 2 and ids[-1] == size - 1
    assert tokenizer.encode("") == [size - 2, size - 1]
    assert tokenizer.encode("", add_special_tokens=False) == []
    without = Tokenizer.from_metadata(byte_level(special, **keys))
    assert without.encode("hi") == without.encode("hi", add_special_tokens=False)
    # Llama 3 begins texts with BOS although its vocabulary files do not say so.
    llama = Tokenizer.from_metadata(byte_level(special, pre="llama-bpe", **keys))
    assert llama.encode("hi")[0] == llama.bos_id == size - 2


def test_every_id_that_ends_a_turn_is_known() -> None:
    special = {
        "<|endoftext|>": CONTROL, "<|im_end|>": USER_DEFINED, "<|eot_id|>": NORMAL,
        "<|eom_id|>": CONTROL, "<x>": CONTROL, "<y>": CONTROL, "<|im_start|>": CONTROL,
    }  # fmt: skip
    first = len(byte_level({})["tokenizer.ggml.tokens"])
    tokenizer = Tokenizer.from_metadata(
        byte_level(special, eos_token_id=first + 4, eot_token_id=first + 5)
    )
    assert tokenizer.eog_ids == set(range(first, first + 6))
    assert tokenizer.eos_id == first + 4 and tokenizer.bos_id is None
    assert vocab("llama-bpe").eog_ids == {128001, 128009}
    assert vocab("phi-3").eog_ids == {2, 32000, 32007}
    # "</s>" is in Qwen's vocabulary as HTML, made by merges.
    assert vocab("qwen2").eog_ids == {151643, 151645}


def test_harmony_s_end_of_a_message_does_not_end_the_turn() -> None:
    special = {"<|return|>": CONTROL, "<|call|>": CONTROL, "<|end|>": CONTROL}
    tokenizer = Tokenizer.from_metadata(byte_level(special))
    assert tokenizer.eog_ids == {tokenizer.vocab_size - 3, tokenizer.vocab_size - 2}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "bert"}, UnsupportedModelError, ("'bert'", "gpt2, llama", "v.gguf")),
        ({"model": None}, CorruptCheckpointError, ("tokenizer.ggml.model", "missing")),
        ({"tokens": None}, CorruptCheckpointError, ("tokenizer.ggml.tokens", "missing")),
        ({"tokens": []}, CorruptCheckpointError, ("tokenizer.ggml.tokens", "not empty")),
        ({"merges": None}, CorruptCheckpointError, ("tokenizer.ggml.merges", "missing")),
        ({"merges": ["hello"]}, CorruptCheckpointError, ("merges[0]", "'hello'")),
        ({"merges": ["q q"]}, CorruptCheckpointError, ("merges", "qq")),
        ({"token_type": [1, 1]}, CorruptCheckpointError, ("token_type", "array of 2", "275")),
        ({"token_type": "x"}, CorruptCheckpointError, ("token_type",)),
        ({"bos_token_id": "x"}, CorruptCheckpointError, ("bos_token_id", "'x'")),
        ({"add_bos_token": 7}, CorruptCheckpointError, ("add_bos_token", "7")),
    ],
)
def test_metadata_that_contradicts_itself_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    metadata = byte_level(**changes)
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(error) as caught:
        Tokenizer.from_metadata(metadata, "v.gguf")
    for word in (*words, "v.gguf"):
        assert word in str(caught.value)


def test_doubled_tokens_bad_bytes_and_missing_scores_are_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match=r"tokens 7 and 300 .*'a'"):
        tokens = [f"t{i}" for i in range(301)]
        tokens[7] = tokens[300] = "a"
        Tokenizer.from_metadata(byte_level(tokens=tokens, token_type=[1] * 301, merges=["x y"]))
    metadata = sentence_piece({"<0xZZ>": BYTE})
    with pytest.raises(CorruptCheckpointError, match="'<0xZZ>'"):
        Tokenizer.from_metadata(metadata)
    metadata = sentence_piece()
    with pytest.raises(CorruptCheckpointError, match="array of 3"):
        Tokenizer.from_metadata(metadata | {"tokenizer.ggml.scores": [1.0, 2.0, 3.0]})
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(CorruptCheckpointError, match="scores"):
        Tokenizer.from_metadata(metadata)


def test_a_special_id_outside_the_vocabulary_counts_as_not_given(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = Tokenizer.from_metadata(byte_level(padding_token_id=2**32 - 1, bos_token_id=10**6))
    assert tokenizer.bos_id is None
    assert "bad-special-token" in caplog.text and "4294967295" in caplog.text


def test_decoding_refuses_ids_outside_the_vocabulary() -> None:
    tokenizer = Tokenizer.from_metadata(byte_level())
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(RequestError, match=rf"ids\[1\] is {bad}; .*{tokenizer.vocab_size - 1}"):
            tokenizer.decode([0, bad])
    with pytest.raises(RequestError, match=r"ids\[0\] is 'a'"):
        tokenizer.decode("a")  # type: ignore[arg-type]
    assert tokenizer.decode(np.array([0, 1])) == tokenizer.decode([0, 1])


def test_half_a_surrogate_pair_is_refused_where_it_is() -> None:
    for metadata in (byte_level(), sentence_piece()):
        with pytest.raises(RequestError, match="character 2 is half a surrogate"):
            Tokenizer.from_metadata(metadata).encode("ab\ud83d")
        with pytest.raises(RequestError, match="a str is expected, not bytes"):
            Tokenizer.from_metadata(metadata).encode(b"ab")  # type: ignore[arg-type]


def test_tokens_are_bytes_of_which_several_may_make_one_character() -> None:
    tokenizer = vocab("gpt-2")
    ids = tokenizer.encode("🙂")
    assert len(ids) > 1 and b"".join(map(tokenizer.token_bytes, ids)) == "🙂".encode()
    assert tokenizer.decode(ids[:1]) == "\ufffd"


@pytest.mark.parametrize("name", ["gpt-2", "phi-3"])
def test_64_threads_encode_at_once(name: str) -> None:
    tokenizer = vocab(name)
    texts = [text for text, _ in packed(name)["cases"]]
    expected = [ids for _, ids in packed(name)["cases"]]

    def work(_: int) -> bool:
        found = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return found == expected and [tokenizer.decode(ids) for ids in found] == texts

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(work, range(128)))


@pytest.mark.parametrize("name", ["gpt-2", "phi-3"])
@pytest.mark.parametrize("text", ["a", " ", "<", "<|"])
def test_the_time_to_encode_grows_with_the_text_and_not_its_square(name: str, text: str) -> None:
    tokenizer = vocab(name)
    start = time.process_time()
    ids = tokenizer.encode(text * (200_000 // len(text)), parse_special_tokens=True)
    assert time.process_time() - start < 5  # measured: 0.02 to 0.1 s
    assert len(ids) > 10_000


def test_a_file_with_a_vocabulary_and_nothing_else_makes_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    metadata = byte_level()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_chat_template("{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.from_file(path)
    assert spelled(tokenizer, tokenizer.encode("hello wor")) == ["hello", " wor"]
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]) == tokenizer.encode(
        "hello"
    )


@pytest.mark.real_model
def test_gemma_s_262144_tokens_load_quickly(gemma_path: Path) -> None:
    start = time.process_time()
    tokenizer = Tokenizer.from_file(gemma_path)
    assert time.process_time() - start < 4  # measured: 0.9 s
    assert tokenizer.vocab_size == 262_144
    assert tokenizer.encode("Hello world") == [2, 9259, 1902]
    assert {1, 106} <= tokenizer.eog_ids


@pytest.mark.real_model
@pytest.mark.parametrize("model", ["smollm2_path", "gemma_path"])
def test_ids_are_llama_cpp_s_on_a_real_model(model: str, request: pytest.FixtureRequest) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    path: Path = request.getfixturevalue(model)
    tokenizer = Tokenizer.from_file(path)
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 64
    params.warmup = False
    server = xllamacpp.Server(params)

    def reference(text: str, parse: bool) -> list[int]:
        body = {"content": text, "add_special": False, "parse_special": parse}
        query = urllib.request.Request(
            f"{server.listening_address}/tokenize",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(query, timeout=20) as answer:
            ids: list[int] = json.load(answer)["tokens"]
            return ids

    control = "<|im_start|>user\nhi<|im_end|>\n<bos><start_of_turn>model\n<end_of_turn><eos></s><s>"
    own = [
        *(
            "a\x1d'b",
            "  two   three    four",
            "\n\n\n x\n\n",
            "\u2581x\u2581\u2581",
            "e\u0301\ufeff\x85",
        ),
        *("<td>x</td> ", control, f" {control} ", "<|im_end", "|>", "[multimodal]<unused3>"),
    ]
    for text in [*(text for text, _ in packed("gpt-2")["cases"]), *own]:
        for parse in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=parse)
            assert ids == reference(text, parse), (text, parse)
