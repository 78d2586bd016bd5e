"""`Program`: an exported program, run in Python without Lamina's model code: PyTorch and the tokenizer are enough.

    program = lamina.Program.load("model.pt2")
    print(program.generate(["The sky is"], max_new_tokens=20).text[0])

    program.feed([[1, 2, 3], [4, 5]])       # rows of different lengths, in as many calls as needed
    program.rewind([0, 1])                  # the last token of row 1 is dropped
    program.reset()                         # every row is empty again

The host's part is here: it cuts prompts into chunks, checks what it is given, and ends rows. The device's part, from
ids to the next ids, cache and clock included, is in the programs.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.errors import CapacityError, InputError, RewindError
from lamina.exporting.archive import Archive
from lamina.exporting.manifest import DTYPES, Manifest
from lamina.exporting.runners import Runner, runner_of
from lamina.exporting.text import tokenizer_of

if TYPE_CHECKING:
    from lamina.checkpoint.tokenizer import Tokenizer
    from lamina.exporting.export import Exported

OnToken = Callable[[int, int], None]
"""on_token(row, id): called for each new token."""


@dataclass(frozen=True)
class Generated:
    """What `Program.generate` made: the new ids of each row, and their text if there is a tokenizer."""

    tokens: list[list[int]]
    text: list[str]


class Program:
    """A loaded program and its cache. `lengths` are the tokens that each row holds."""

    def __init__(self, manifest: Manifest, runner: Runner, tokenizer: Tokenizer | None) -> None:
        self.manifest, self.tokenizer = manifest, tokenizer
        self.cache = runner.cache
        self._runner = runner
        self.lengths = [0] * manifest.rows
        self._sourced = [manifest.source is None] * manifest.rows
        self.logits: Tensor | None = None
        """[B, vocab] after each row's last token; None before the first."""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Program:
        """Loads an archive that `lamina.export` wrote. The cache is allocated, and empty."""
        archive = Archive(path)
        manifest = archive.manifest
        tokenizer = None
        if manifest.tokenizer is not None:
            tokenizer = tokenizer_of(archive.read("tokenizer.json"), manifest.tokenizer)
        return cls(manifest, runner_of(archive), tokenizer)

    @classmethod
    def of(cls, exported: Exported) -> Program:
        """The programs that `lamina.export` returned, run where they are, over the cache that they were traced with."""
        from lamina.exporting.runners import TorchRunner  # not needed for a program that is loaded

        modules = {name: program.module() for name, program in exported.programs.items()}
        return cls(exported.manifest, TorchRunner(modules, exported.cache), exported.tokenizer)

    @property
    def rows(self) -> int:
        return self.manifest.rows

    def __repr__(self) -> str:
        m = self.manifest
        room = "any length" if m.limit is None else f"{m.limit} tokens"
        return f"Program({m.family}, {m.rows} rows of {room}, {m.target}, {', '.join(m.programs)})"

    # -- passes ----------------------------------------------------------------------------------------------------

    def feed(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Appends ids to each row, as many as there are: an empty list leaves a row as it is. -> the most likely next
        id of each row [B]; -1 for rows that hold no token yet"""
        checked = self._checked(rows, self.manifest.vocab)
        self._check_room([len(row) for row in checked])
        self._check_sources([len(row) for row in checked])
        done = 0
        while any(len(row) > done for row in checked):
            self._feed_chunk([row[done : done + self.manifest.chunk] for row in checked])
            done += self.manifest.chunk
        if self.logits is None:
            return torch.full((self.rows,), -1)
        held = torch.tensor([length > 0 for length in self.lengths])
        return torch.where(held, self.logits.argmax(dim=-1).cpu(), -1)

    def _feed_chunk(self, rows: list[list[int]]) -> None:
        """Feeds up to `chunk` ids to each row, in one call of a program."""
        counts = [len(row) for row in rows]
        name = "decode" if max(counts) == 1 else "prefill"
        ids = torch.zeros(self.rows, max(counts), dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        _, logits = self.call(name, ids, torch.tensor(counts))
        if self.logits is None or min(counts) > 0:
            self.logits = logits.clone()
        else:
            some = torch.tensor(counts, device=logits.device) > 0
            self.logits = torch.where(some[:, None], logits, self.logits)

    def call(self, name: str, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Calls `prefill` or `decode` itself: feeds the first counts [B] of the ids [B, T] to each row.
        -> the most likely next ids [B], and logits [B, vocab]; of rows with a count of 0 they mean nothing"""
        self._check_inputs(name, (ids, counts))
        fed = counts.tolist()
        if min(fed) < 0 or max(fed) > ids.shape[1]:
            raise InputError(f"counts={fed}: each must be between 0 and the {ids.shape[1]} ids of a row")
        self._check_room(fed)
        self._check_sources(fed)
        lengths = [length + n for length, n in zip(self.lengths, fed, strict=True)]
        inputs = [ids, counts, *self._slots(name, max(lengths))]
        tokens, logits = self._runner.run(name, *(one.to(self.manifest.device) for one in inputs))
        self.lengths = lengths
        return tokens, logits

    def _slots(self, name: str, longest: int) -> list[Tensor]:
        """The input `slots` of a program, whose size is the number of slots that full attention reads."""
        wanted = self.manifest.programs[name]["inputs"].get("slots")
        if wanted is None:
            return []
        least = wanted["shape"][0][0]
        return [torch.empty(max(least, longest), dtype=DTYPES[wanted["dtype"]], device=self.manifest.device)]

    def encode(self, given: Sequence[Sequence[int]] | Tensor, counts: Sequence[int] | None = None) -> None:
        """Runs the encoder and attaches its output. A row whose source is empty keeps what it has.

        given    the ids of each row's source, or features [B, mels, frames]; counts [B]: real frames of each row
        """
        source = self.manifest.source
        if source is None:
            raise InputError(f"{self.manifest.family} reads no source: only encoder–decoder models do")
        *sizes, width = next(iter(self.manifest.programs["encode"]["inputs"].values()))["shape"]
        least = width if isinstance(width, int) else width[0]
        if source["kind"] == "ids":
            if isinstance(given, Tensor):
                given = given.tolist()
            rows = self._checked(given, source["vocab"])
            counts = [len(row) for row in rows]
            inputs = torch.zeros(self.rows, max(counts), dtype=torch.int64)
            for i, row in enumerate(rows):
                inputs[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        else:
            if not isinstance(given, Tensor):
                raise InputError(
                    f"the source of {self.manifest.family} is features, not text or ids: give Program.generate or "
                    f"Program.encode a tensor [B, …, frames]"
                )
            inputs = given.to(DTYPES[self.manifest.dtype])
            if inputs.dim() != len(sizes) + 1:
                self._check_inputs("encode", (inputs,))  # which raises
            counts = [inputs.shape[-1]] * self.rows if counts is None else whole_numbers("counts", counts)
        if inputs.shape[-1] > source["most"]:
            raise CapacityError(
                f"the source is {inputs.shape[-1]} long, and the program was exported for {source['most']}: export it "
                "with a larger source="
            )
        if any(not 0 <= n <= inputs.shape[-1] for n in counts):
            raise InputError(f"counts={counts}: each must be between 0 and the {inputs.shape[-1]} features of a row")
        if inputs.shape[-1] < least:
            inputs = torch.nn.functional.pad(inputs, (0, least - inputs.shape[-1]))
        lengths = torch.tensor(counts)
        self._check_inputs("encode", (inputs, lengths))
        self._runner.run("encode", inputs.to(self.manifest.device), lengths.to(self.manifest.device))
        self._sourced = [had or n > 0 for had, n in zip(self._sourced, counts, strict=True)]

    # -- going back ------------------------------------------------------------------------------------------------

    @property
    def rewindable(self) -> list[int]:
        """How many tokens each row can be rewound by."""
        m = self.manifest
        most = list(self.lengths)
        written, base = (self.cache[f"clock_{name}"].tolist() for name in ("written", "base"))
        for row, length in enumerate(self.lengths):
            for ring, keep in m.rings:
                if written[row] - keep > ring:  # older tokens were overwritten
                    most[row] = min(most[row], max(0, min(m.slack, m.slack + 1 - (written[row] - length))))
            if m.states:
                most[row] = min(most[row], length - base[row])
        return most

    def rewind(self, n: int | Sequence[int]) -> None:
        """Drops the last n tokens of each row (one count, or one for each), as if they had never been fed."""
        counts = [n] * self.rows if isinstance(n, int) else list(n)
        if len(counts) != self.rows or min(counts) < 0:
            raise InputError(f"rewind({n!r}): give one count of at least 0, or one for each of the {self.rows} rows")
        for row, (back, most) in enumerate(zip(counts, self.rewindable, strict=True)):
            if back > most:
                raise RewindError(
                    f"row {row} cannot be rewound by {back}: of its {self.lengths[row]} tokens, {most} can be dropped "
                    f"(slack is {self.manifest.slack}). Export the model with slack={back} or more, or reset the row"
                )
        if "rewind" in self.manifest.programs:
            self._runner.run("rewind", torch.tensor(counts, device=self.manifest.device))
        else:
            clock = self.cache["clock_lengths"]
            clock -= torch.tensor(counts, device=clock.device)
        self.lengths = [length - back for length, back in zip(self.lengths, counts, strict=True)]

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Empties these rows (all when None); their sources too."""
        index = list(range(self.rows)) if rows is None else list(rows)
        if any(row not in range(self.rows) for row in index):
            raise InputError(f"reset({rows!r}): there are rows 0 to {self.rows - 1}")
        if "reset" in self.manifest.programs:
            chosen = torch.zeros(self.rows, dtype=torch.bool)
            chosen[index] = True
            self._runner.run("reset", chosen)
        else:
            for tensor in self.cache.values():
                tensor[index] = 0
        for row in index:
            self.lengths[row], self._sourced[row] = 0, self.manifest.source is None

    # -- text ------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]] | Tensor,
        max_new_tokens: int = 100,
        *,
        counts: Sequence[int] | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        on_token: OnToken | None = None,
    ) -> Generated:
        """Continues a text, or prompts that are texts or ids, from empty rows: with the most likely token, or, for a
        temperature above 0, with one that is drawn. A row ends with an end-of-sequence id, after `max_new_tokens`, or
        when it is full.

        prompts   of a model whose source is audio: features [B, …, frames], of which each row has `counts` [B]
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        if len(prompts) > self.rows or not len(prompts):
            raise InputError(
                f"{len(prompts)} prompts were given, and the program has {self.rows} rows: give 1 to that many"
            )
        if temperature < 0:
            raise InputError(f"temperature={temperature}: it must be 0 (the most likely token) or more")
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens={max_new_tokens}: it must be at least 1")
        ids = self._begin(prompts, counts)
        draw = torch.Generator().manual_seed(seed)
        made: list[list[int]] = [[] for _ in prompts]
        following = self.feed(ids)
        live = list(range(len(prompts)))
        while True:
            chosen = following.tolist() if temperature == 0 else self._drawn(temperature, draw)
            going = []
            for row in live:
                made[row].append(chosen[row])
                if on_token is not None:
                    on_token(row, chosen[row])
                full = self.manifest.limit is not None and self.lengths[row] >= self.manifest.limit
                if chosen[row] not in self.manifest.eos_ids and len(made[row]) < max_new_tokens and not full:
                    going.append(row)
            live = going
            if not live:
                break
            following = self.feed([[chosen[row]] if row in live else [] for row in range(self.rows)])
        text = [] if self.tokenizer is None else [self.tokenizer.decode(row) for row in made]
        return Generated(made, text)

    def _begin(self, prompts: Sequence[str | Sequence[int]] | Tensor, counts: Sequence[int] | None) -> list[list[int]]:
        """Empties all rows and encodes the sources, if prompts are sources. -> the first ids of each row"""
        unused = self.rows - len(prompts)
        if isinstance(prompts, Tensor):
            if self.manifest.source is None or self.manifest.source["kind"] != "features":
                raise InputError(f"{self.manifest.family} reads text: give prompts as texts or lists of ids")
            given = [prompts.shape[-1]] * len(prompts) if counts is None else whole_numbers("counts", counts)
            sources = torch.cat([prompts, prompts.new_zeros(unused, *prompts.shape[1:])])
            check_prompts(given)
            self.reset()
            self.encode(sources, [*given, *[0] * unused])
            return [list(self.manifest.start_ids) if row < len(prompts) else [] for row in range(self.rows)]
        if counts is not None:
            raise InputError("counts are for prompts that are features: lists of ids have lengths of their own")
        ids = [self.ids_of(prompt) for prompt in prompts] + [[]] * unused
        check_prompts([len(row) for row in ids[: len(prompts)]])
        self.reset()
        if self.manifest.source is None:
            return ids
        self.encode(ids)  # the prompts are sources; the decoder's rows begin with the start ids
        return [list(self.manifest.start_ids) if row else [] for row in ids]

    def ids_of(self, prompt: str | Sequence[int]) -> list[int]:
        """The ids of a prompt."""
        if not isinstance(prompt, str):
            return whole_numbers("ids", prompt)
        if self.tokenizer is None:
            raise InputError("the program has no tokenizer: give prompts as lists of ids")
        return self.tokenizer.encode(prompt)

    def _drawn(self, temperature: float, draw: torch.Generator) -> list[int]:
        assert self.logits is not None
        shares = (self.logits.float().cpu() / temperature).softmax(dim=-1).nan_to_num(1.0)
        return torch.multinomial(shares, 1, generator=draw)[:, 0].tolist()

    # -- checks ----------------------------------------------------------------------------------------------------

    def _checked(self, rows: Sequence[Sequence[int]], vocab: int) -> list[list[int]]:
        if len(rows) != self.rows:
            raise InputError(
                f"{len(rows)} rows of ids were given, and the program has {self.rows}: give a list for each"
            )
        found = [whole_numbers(f"ids of row {i}", row) for i, row in enumerate(rows)]
        for i, row in enumerate(found):
            for token in row:
                if not 0 <= token < vocab:
                    raise InputError(f"row {i} has the id {token}: ids are 0 to {vocab - 1}")
        return found

    def _check_room(self, more: Sequence[int]) -> None:
        limit = self.manifest.limit
        for row, (length, n) in enumerate(zip(self.lengths, more, strict=True)):
            if limit is not None and length + n > limit:
                raise CapacityError(
                    f"row {row} holds {length} tokens and {n} more were given, but the program has room for {limit}. "
                    "Export the model with a larger capacity, or take the row back with rewind or reset"
                )

    def _check_sources(self, more: Sequence[int]) -> None:
        for row, n in enumerate(more):
            if n and not self._sourced[row]:
                raise InputError(f"row {row} has no source: give each row one with encode(…) before its first token")

    def _check_inputs(self, name: str, given: Sequence[Tensor]) -> None:
        if name not in self.manifest.programs:
            raise InputError(f"there is no program {name!r}: this archive has {', '.join(self.manifest.programs)}")
        wanted: Mapping[str, Any] = self.manifest.programs[name]["inputs"]
        for (what, one), tensor in zip(wanted.items(), given, strict=False):  # `slots` is made here
            fits = tensor.dtype == DTYPES[one["dtype"]] and tensor.dim() == len(one["shape"])
            for size, have in zip(one["shape"], tensor.shape, strict=False):
                fits = fits and (size == have if isinstance(size, int) else size[0] <= have <= size[1])
            if not fits:
                shape = [size if isinstance(size, int) else f"{size[0]} to {size[1]}" for size in one["shape"]]
                raise InputError(
                    f"{name} takes {what} {one['dtype']} [{', '.join(map(str, shape))}], not "
                    f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                )


def whole_numbers(name: str, given: Iterable[Any]) -> list[int]:
    """Ids as a list of ints.

    >>> whole_numbers("ids", torch.tensor([3, 4]))
    [3, 4]
    """
    try:
        return [operator.index(i) for i in given]
    except TypeError:
        raise InputError(f"{name}={given!r}: they must be whole numbers") from None


def check_prompts(counts: list[int]) -> None:
    """Raises if a prompt holds nothing: its row would have no most likely next id."""
    if 0 in counts:
        raise InputError(f"prompt {counts.index(0)} is empty: give at least one token, or one frame of features")
