"""T5's relative positions: a learned value per head and bucket of distances, added to the scores.

Small distances have a bucket each, larger ones share buckets that grow with the distance, and all distances beyond
`farthest` share the last bucket. The table distance -> bucket is made once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lamina.attention.bias import BucketForm
from lamina.errors import InputError


class RelativeBias(nn.Module):
    """The `bias` of `memory.attend`: bias(head, q_position, kv_position). `both_ways`: half of the buckets are for keys
    after the query."""

    def __init__(self, heads: int, buckets: int, farthest: int, *, both_ways: bool) -> None:
        super().__init__()
        self.both_ways, self.farthest = both_ways, farthest
        self.buckets = buckets // 2 if both_ways else buckets  # in one direction
        if not 1 <= self.buckets // 2 < farthest:
            raise InputError(
                f"relative positions in {buckets} buckets up to a distance of {farthest}: there must be at least "
                f"{4 if both_ways else 2} buckets, and the distance must be larger than {self.buckets // 2}"
            )
        self.weight = nn.Parameter(torch.zeros(buckets, heads))
        self.bucket_of: Tensor
        distances = farthest + 1 + farthest * both_ways  # from 0 on, or from -farthest
        self.register_buffer("bucket_of", torch.empty(distances, dtype=torch.int64), persistent=False)
        if not self.bucket_of.is_meta:
            self.reset_buffers()

    def reset_buffers(self) -> None:
        near = self.buckets // 2
        distance = torch.arange(self.farthest + 1)
        share = torch.log(distance.clamp(min=near).float() / near) / math.log(self.farthest / near)
        far = near + (share * (self.buckets - near)).long().clamp(max=self.buckets - near - 1)
        self.bucket_of = torch.where(distance < near, distance, far)
        if self.both_ways:
            self.bucket_of = torch.cat([self.bucket_of[1:].flip(0) + self.buckets, self.bucket_of])

    def forward(self, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        first = -self.farthest if self.both_ways else 0
        return self.weight[self.bucket_of[(q - kv).clamp(first, self.farthest) - first], head]

    def kernel_form(self) -> BucketForm:
        return BucketForm(self.weight, self.bucket_of, self.both_ways)
