"""Models of text: GPT, BERT, and a recurrent translator."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from bench_models.workload import Workload


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(self.attended(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(self.activated(self.up(self.norm2(x))))

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)


class Explicit(Block):
    """Attention is spelled out, with scores that are filled where they do not count."""

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return self.masked(scores, _seen(q.shape[-2], q.device)).softmax(-1) @ v

    def masked(self, scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(~seen, float("-inf"))


class SpelledOut(Explicit):
    """As in transformers' GPT-2: a mask is added, and GELU spelled out, too."""

    def masked(self, scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        zero = self.up.weight.new_zeros(())  # of the model's dtype, under autocast too
        return scores + torch.where(seen, zero, torch.finfo(zero.dtype).min)

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * x.pow(3.0))))


def _seen(length: int, device: torch.device) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


class GPT(nn.Module):
    """A decoder with learned positions and a tied head."""

    def __init__(
        self, vocabulary: int, width: int, depth: int, length: int, block: type[Block] = Block
    ):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[block(width, width // 64) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def gpt_compute_bound(device: str, large: bool) -> Workload:
    return _gpt(device, large, *((8, 1024) if large else (8, 128)))


def gpt_launch_bound(device: str, large: bool) -> Workload:
    return _gpt(device, large, *((1, 128) if large else (1, 64)))


def gpt_explicit_attention(device: str, large: bool) -> Workload:
    return _gpt(device, large, *((8, 1024) if large else (4, 128)), Explicit)


def gpt_spelled_out(device: str, large: bool) -> Workload:
    return _gpt(device, large, *((8, 1024) if large else (4, 128)), SpelledOut)


def _gpt(device: str, large: bool, batch: int, length: int, block: type[Block] = Block) -> Workload:
    vocabulary, width, depth = (50257, 768, 12) if large else (1000, 256, 4)  # GPT-2
    ids = torch.randint(0, vocabulary, (batch, length + 1), device=device)
    model = GPT(vocabulary, width, depth, length, block)

    def loss(m: nn.Module) -> torch.Tensor:
        return F.cross_entropy(m(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return Workload(model, loss)


class Bert(nn.Module):
    """An encoder of post-norm layers, and its head for masked words."""

    def __init__(self, vocabulary: int, width: int, depth: int, length: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.segments, self.norm = nn.Embedding(2, width), nn.LayerNorm(width)
        shape = width, width // 64, 4 * width, 0.0, "gelu"
        layers = [nn.TransformerEncoderLayer(*shape, batch_first=True) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, ids: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]] + self.segments(segments)
        return F.linear(self.head(self.layers(self.norm(x))), self.tokens.weight, self.bias)


def bert(device: str, large: bool) -> Workload:
    vocabulary, width, depth = (30522, 1024, 24) if large else (1000, 256, 4)  # BERT-large
    batch, length = (16, 512) if large else (4, 128)
    ids = torch.randint(0, vocabulary, (batch, length), device=device)
    segments = (torch.arange(length, device=device) >= length // 2).long().expand(batch, length)
    targets = ids.masked_fill(torch.rand(batch, length, device=device) > 0.15, -100).flatten()
    model = Bert(vocabulary, width, depth, length)

    def loss(m: nn.Module) -> torch.Tensor:
        return F.cross_entropy(m(ids, segments).flatten(0, 1), targets)

    return Workload(model, loss)


class Translator(nn.Module):
    """Recurrent encoder and decoder, small."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 128)
        self.encoder = nn.LSTM(128, 128, batch_first=True)
        self.decoder = nn.LSTM(128, 128, batch_first=True)
        self.head = nn.Linear(128, 500)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        _, state = self.encoder(self.words(source))
        return self.head(self.decoder(self.words(target), state)[0])


class GNMT(nn.Module):
    """Four layers each way, the first bidirectional, with attention to the encoder's results."""

    def __init__(self, vocabulary: int = 32000, width: int = 1024):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.both_ways = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.encoder = nn.LSTM(2 * width, width, 3, batch_first=True)
        self.first = nn.LSTM(width, width, batch_first=True)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.decoder = nn.LSTM(2 * width, width, 3, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(self.both_ways(self.words(source))[0])[0]
        state = self.first(self.words(target))[0]
        scores = torch.bmm(self.query(state), self.key(memory).transpose(1, 2))
        context = torch.bmm((scores * memory.shape[-1] ** -0.5).softmax(-1), memory)
        return self.head(self.decoder(torch.cat([state, context], -1))[0])


def seq2seq(device: str, large: bool) -> Workload:
    batch, length, vocabulary = (128, 50, 32000) if large else (16, 8, 500)
    ids = torch.randint(0, vocabulary, (batch, 2 * length + 1), device=device)

    def loss(m: nn.Module) -> torch.Tensor:
        scores = m(ids[:, :length], ids[:, length:-1])
        return F.cross_entropy(scores.flatten(0, 1), ids[:, length + 1 :].flatten())

    return Workload(GNMT() if large else Translator(), loss)
