"""Tokenizers whose vocabulary is a list of byte strings by rank: tekken.json (Mistral) and tiktoken.model (Kimi).

Two tokens whose joined bytes are a token are merged, the joined token of lowest rank first.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lamina.checkpoint.folder import read_json
from lamina.checkpoint.gguf.splits import KIMI, LLAMA3
from lamina.checkpoint.tokenizer import Tokenizer
from lamina.checkpoint.vocab.files import TokenizerFiles, added_token, read_optional
from lamina.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

FIRST_TEKKEN = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
]  # fmt: skip
"""Special tokens of the first tekken.json files, which do not list them."""


def tekken(files: TokenizerFiles) -> Tokenizer:
    """Special tokens come first, then those of the list; `<s>` before each text."""
    path = files.named("tekken.json")
    found = read_json(path)
    try:
        config, listed = found["config"], found.get("special_tokens")
        special = FIRST_TEKKEN if listed is None else [token["token_str"] for token in sorted(listed, key=rank)]
        count = config.get("default_num_special_tokens") or len(special)
        special = [*special, *(f"<SPECIAL_{i}>" for i in range(len(special), count))]
        size = config.get("default_vocab_size")
        entries = found["vocab"] if size is None else found["vocab"][: size - count]
        tokens = [base64.b64decode(entry["token_bytes"]) for entry in entries]
        pattern = config["pattern"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a vocabulary of Mistral's: {type(error).__name__}: {error}") from error
    backend = byte_merges(tokens, pattern, special)
    backend.add_special_tokens([added_token(text, special=True) for text in special])
    names = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
    known = {name: text for name, text in names.items() if text in special}
    return files.finish(backend, files.tokens(known), before=[known["bos_token"]] if "bos_token" in known else [])


def rank(entry: Mapping[str, Any]) -> int:
    return int(entry["rank"])


def tiktoken(files: TokenizerFiles) -> Tokenizer:
    """A token and its rank on each line; added tokens follow them."""
    path = files.named("tiktoken.model")
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token): int(number) for token, number in pairs}
    except ValueError as error:
        raise CheckpointError(f"{path} is not a vocabulary of tiktoken: {error}") from error
    tokens = sorted(ranks, key=ranks.__getitem__)
    if [ranks[token] for token in tokens] != list(range(len(tokens))):
        raise CheckpointError(f"{path} has ranks that are not 0, 1, 2 … {len(tokens) - 1}")
    kimi = str(read_optional(files.path / "config.json").get("model_type", "")).startswith("kimi")
    backend = byte_merges(tokens, KIMI if kimi else LLAMA3)
    last = max(files.added, default=-1)
    missing = [index for index in range(len(tokens), last) if index not in files.added]
    files.added |= {index: added_token(f"<|reserved_token_{index}|>", special=True) for index in missing}
    named = files.tokens({})
    return files.finish(backend, named, **files.around(named))


def byte_merges(tokens: Sequence[bytes], pattern: str, first: Sequence[str] = ()) -> Backend:
    """Byte-level BPE.

    pattern  cuts a text into words
    first    texts with the lowest ids
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    ranks = {token: index for index, token in enumerate(tokens)}
    letters = byte_letters()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    pairs = [
        (index, ranks[token[:cut]], ranks[token[cut:]], token[:cut], token[cut:])
        for token, index in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    merges = [(text(left), text(right)) for *_, left, right in sorted(pairs)]
    vocab = {one: index for index, one in enumerate(first)}
    vocab |= {text(token): index + len(first) for token, index in ranks.items()}
    model: Any = models.BPE(vocab, merges, fuse_unk=False, ignore_merges=True)
    backend = Backend(model)
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte: itself if it is printed, else one from 256 on.

    >>> byte_letters()[ord("a")], byte_letters()[ord(" ")]
    ('a', 'Ġ')
    """
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + others.index(byte)) for byte in range(256)]
