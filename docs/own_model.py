"""A whole model of one's own, from plain PyTorch layers, and what it can do: `python docs/own_model.py`"""

import torch
from torch import nn

import lamina


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        mlp = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), *mlp)
        self.specs = {"attention": lamina.cache.Attention(heads, self.head_dim, self.head_dim)}  # what is remembered

    def forward(self, x, memory, shared):  # x [B, T, width]
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        x = x + self.out(memory.attend(q, k, v, scale=self.head_dim**-0.5).transpose(1, 2).flatten(2))
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
    model = Mine().eval()
    result = model.generate([[1, 2, 3], [4, 5]], max_new_tokens=20)  # ragged rows
    assert lamina.verify(model)  # the cache changes nothing
    coded = model.generate([[1, 2, 3]], max_new_tokens=20, cache=model.new_cache(codec="int8"))
    result.cache.save("mine.cache")
    print(model.generate([[6], [7]], max_new_tokens=5, cache=lamina.load_cache("mine.cache", model)).tokens)
    store = lamina.PrefixStore(model, bytes=2**20)
    for prompt in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6]):
        print(model.generate([prompt], max_new_tokens=5, prefixes=store).reused, "tokens were known")
    print(model.explain())  # on a GPU: one captured graph a step
