"""Builds every kernel of a decode step for a GPU, without one: `python -m tests.kernels.building FAMILY[:HOW] …`

`products` in place of a family: products in configs that only larger models than those of the tests need;
`mixtures`: options of mixtures of experts; `slack`: what every rule launches for a cache that can be rewound.
`beside` as HOW: in a thread, beside plain passes.

HOW is one or several of these, with commas between: a number, the tokens per row of a captured pass; a codec; p and a
number, the slots of a page; s and a number, the slack; r and a number, the rows.

Run apart from the tests, whose kernels are interpreted. Building finds what the interpreter lets through: types that do
not meet, tuples of another length. Prints how many kernels each family has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextvars import copy_context
from threading import Thread
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing is loaded, also where something could be

import torch
from triton.runtime import jit

from bench.kernels.offline import instead_of_a_gpu


def build(family: str, hows: list[str], dtype: torch.dtype) -> int:
    from lamina.loading import on_meta
    from lamina.runtime.prebuild import build_kernels
    from tests.families.cases import cases

    how: dict[str, Any] = {}
    for one in hows:
        if one.isdigit():
            how["tokens"] = int(one)
        elif one[1:].isdigit() and one[0] in "prs":
            how[{"p": "page", "r": "rows", "s": "slack"}[one[0]]] = int(one[1:])
        else:
            how["codec"] = one
    model = on_meta(cases(family)[next(iter(cases(family)))]().to_dict(), dtype)
    return built_by(lambda: build_kernels(model, **how))


def build_products() -> int:
    """Sums in parts, with all that may stand around a product; a layer norm inside, attention of one query."""
    from lamina.attention.window import Full
    from lamina.kernels.attention.decode_fused import attend_token
    from lamina.kernels.columns import WIDTH
    from lamina.kernels.gemm.deferred_norm import LANES, DeferredNorm
    from lamina.kernels.gemm.product import Rows, Tiles, gated_product, product
    from lamina.nn import LayerNorm, RMSNorm
    from lamina.runtime.builders import build_together

    def program() -> None:
        for dtype in (torch.bfloat16, torch.float32):
            x, weight, rest = (torch.empty(4, k, dtype=dtype) for k in (4864, 4864, 896))
            weight = weight[:1].expand(2 * 896, -1)
            deferred = DeferredNorm(RMSNorm(896), rest[:1], torch.empty(LANES.value * 4, dtype=torch.int64))
            for config, n in ((Rows(splits=2), 1), (Tiles(64, 64, splits=2), 4)):
                product(x[:n], weight[:896], residual=rest[:n], config=config)
                gated_product(x[:n], weight, "silu", config=config)
            product(x[:1], weight[:896], residual=rest[:1], next_norm=deferred, config=Rows(splits=2))
        x, weight, q = (torch.empty(*size, dtype=torch.bfloat16) for size in ((1, 768), (3072, 768), (1, 12, 1, 64)))
        product(x, weight, act="gelu", norm=LayerNorm(768).bfloat16())
        attend_token(q, q, q, None, torch.empty(WIDTH, dtype=torch.int64), Full(), scale=1.0)

    def run() -> None:
        with torch.device("meta"):
            build_together(program)

    return built_by(run)


def build_mixtures() -> int:
    """Options of mixtures of experts that are not in the families of the tests."""
    from lamina import kernels
    from lamina.activation import Gating
    from lamina.nn import Choice, Mixture
    from lamina.runtime.builders import build_together

    gpt_oss = Gating("silu", 7.0, plus=1.0, slope=1.702)
    grouped = Choice(2, groups=2, groups_each=1, group_best=1)
    with torch.device("meta"):
        mixtures = [
            Mixture(96, 4, 40, gpt_oss, Choice(2, normed=True), bias=True, logit_bias=True),
            Mixture(96, 4, 40, "relu2", Choice(2, "sigmoid", least=0.1), gated=False, shared=24, factor=0.5),
            Mixture(96, 4, 40, "silu", grouped, identity=2),
            Mixture(96, 4, 40, "silu", Choice(2, "sparsemixer"), shared=0),
            Mixture(96, 64, 40, "silu", Choice(2)),  # of which three tokens seldom choose the same
        ]

        def program() -> None:
            for mixture in mixtures:
                for rows in (1, 3):
                    mixture.bfloat16()(torch.empty(rows, 1, 96, dtype=torch.bfloat16))
            mixtures[1].float()(torch.empty(3, 1, 96))

        def run() -> None:
            with kernels.in_use():
                build_together(program)

        return built_by(run)


def build_slack() -> int:
    """Base states and logs of inputs, for every rule, in steps, passes and prompts."""
    from bench.kernels.offline import collect_slack
    from lamina.runtime.builders import build_together

    def run() -> None:
        with torch.device("meta"):
            build_together(lambda: collect_slack(torch.bfloat16))

    return built_by(run)


def build_beside(family: str) -> int:
    """In a thread, while plain passes run in this one, which must not notice."""
    from lamina.loading import on_meta
    from lamina.runtime.prebuild import build_kernels
    from tests.families.cases import cases
    from tests.families.harness import pair

    name = next(iter(cases(family)))
    model = pair(family, name)[1]
    twin = on_meta(cases(family)[name]().to_dict(), torch.bfloat16)
    alone = model.generate([[5, 9, 12]], 8).tokens

    def both() -> None:
        builder = Thread(target=copy_context().run, args=(build_kernels, twin))
        builder.start()
        while builder.is_alive():
            assert model.generate([[5, 9, 12]], 8).tokens == alone
        builder.join()

    return built_by(both)


def built_by(run: Callable[[], None]) -> int:
    """How many kernels a run builds."""
    built: set[Any] = set()
    compile_one = jit.JITFunction._do_compile

    def noted(self: Any, key: Any, *args: Any) -> Any:
        built.add((self.__name__, key))
        return compile_one(self, key, *args)

    jit.JITFunction._do_compile = noted
    try:
        run()
    finally:
        jit.JITFunction._do_compile = compile_one
    return len(built)


def main() -> None:
    with instead_of_a_gpu(90):
        for asked in sys.argv[1:]:
            family, *hows = asked.replace(",", ":").split(":")
            if family == "products":
                count = build_products()
            elif family == "mixtures":
                count = build_mixtures()
            elif family == "slack":
                count = build_slack()
            elif hows == ["beside"]:
                count = build_beside(family)
            else:
                count = build(family, hows, torch.bfloat16)
            print(asked, count, flush=True)


if __name__ == "__main__":
    main()
