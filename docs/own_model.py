"""A whole model of one's own, from plain PyTorch layers, verified and captured: `python docs/own_model.py`"""

import torch
from torch import nn

import lamina


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.dim, inner = heads, width // heads, 4 * width
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        self.specs = {"attention": lamina.Attention(heads, self.dim, self.dim)}  # what this block remembers

    def forward(self, x, memory, shared):  # x [B, T, width]
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        x = x + self.out(memory.attend(q, k, v, scale=self.dim**-0.5).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Mine(lamina.Model):
    max_positions = 256

    def __init__(self, vocab=100, width=64, heads=4, layers=2):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(self.max_positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def embed(self, ids):  # [B, T] -> [B, T, width]
        return self.token(ids)

    def add_positions(self, x, positions):  # learned positions
        return x + self.position(positions)

    def unembed(self, x):  # [..., width] -> [..., vocab]
        return self.head(self.norm(x))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Mine().eval().to("cuda" if torch.cuda.is_available() else "cpu")
    assert lamina.verify(model)  # the cache changes nothing, proved on this model
    print(model.generate([[1, 2, 3], [4, 5]], max_new_tokens=5).tokens)  # two rows of different lengths
    print(model.explain().splitlines()[0])  # on a GPU: one captured graph a step
