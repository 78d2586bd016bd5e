"""The tokenizer of RoFormer: WordPiece of Chinese words, which the package rjieba finds."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lamina.checkpoint.folder import read_json
from lamina.checkpoint.tokenizer import Tokenizer, UnknownTokenizer
from lamina.checkpoint.vocab.files import TokenizerFiles
from lamina.checkpoint.vocab.parted import PartedTokenizer
from lamina.checkpoint.vocab.words import BERT, read_lines


class JiebaTokenizer(PartedTokenizer):
    """A word that is no token is cut at Chinese characters and spaces."""

    def part_ids(self, text: str) -> list[int]:
        from tokenizers import normalizers

        single = normalizers.BertNormalizer(
            clean_text=False, handle_chinese_chars=True, strip_accents=False, lowercase=False
        )
        normalizer, model = self.backend.normalizer, self.backend.model
        assert normalizer is not None
        words: list[str] = []
        for word in rjieba().cut(normalizer.normalize_str(text), False):
            words += [word] if model.token_to_id(word) is not None else single.normalize_str(word).split()
        return [piece.id for word in words for piece in model.tokenize(word)]


def roformer(files: TokenizerFiles) -> Tokenizer:
    """`[CLS]` before each text and `[SEP]` after it. The vocabulary is vocab.txt, or that of tokenizer.json."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    rjieba()
    tokens, options = files.tokens(BERT), files.options
    stored = files.path / "tokenizer.json"
    own = not (files.path / "vocab.txt").is_file() and stored.is_file()
    vocab = read_json(stored)["model"]["vocab"] if own else read_lines(files.named("vocab.txt"))
    backend = Backend(models.WordPiece(vocab, unk_token=tokens["unk_token"].content))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=False,
        strip_accents=options.get("strip_accents"),
        lowercase=options.get("do_lower_case", True),
    )
    backend.decoder = decoders.WordPiece(prefix="##")
    first, last = ([vocab[tokens[name].content]] for name in ("cls_token", "sep_token"))
    return files.finish(backend, tokens, make=JiebaTokenizer, first=first, last=last)


def rjieba() -> Any:
    try:
        return import_module("rjieba")
    except ImportError as error:
        raise UnknownTokenizer("this tokenizer needs the package rjieba: pip install rjieba") from error
